/** The scenario about many requests on one Multiplex call: keys, cancel and credit. */

import { text } from "../src/index.js";
import { rejected } from "./rejections.js";
import {
  CALL_MS,
  greedy,
  CheckedStream,
  LONG_TOKENS,
  PROMPT,
  require,
  type ScenarioInput,
} from "./scenario.js";

const NUM_TEXTS = 6;
const CALL = { deadlineMs: CALL_MS };

export async function multiplex(scenario: ScenarioInput): Promise<void> {
  const client = scenario.client();
  const session = client.multiplex();
  const requests = Array.from({ length: NUM_TEXTS }, (_, index) =>
    greedy(40, text(`${PROMPT}, number ${index}`)),
  );
  const all = requests.map((request) => new CheckedStream(session.generate(request, CALL)));
  for (const checked of all) await checked.untilAccepted();

  const bad = new CheckedStream(
    session.generate({ ...greedy(4), sampling: { temperature: -1 } }, CALL),
  );
  await rejected(bad.untilEnd(), "INVALID_ARGUMENT", "INVALID_ARGUMENT");

  await Promise.all(all.map((checked) => checked.untilEnd()));
  for (const [index, request] of requests.entries()) {
    const once = await client.generateOnce(request, CALL);
    require(all[index]?.text === once.outputs[0]?.text, `text ${index} is not GenerateOnce's`);
  }

  const long = new CheckedStream(session.generate(greedy(LONG_TOKENS), CALL));
  await long.untilTokens();
  long.stream.stop();
  await long.untilEnd();
  require(long.finishReason === "CANCELLED", `the cancelled one ended by ${long.finishReason}`);

  const credit = { ...CALL, windowTokens: 5, isCreditManual: true };
  const thrifty = new CheckedStream(session.generate(greedy(20), credit));
  await thrifty.untilTokens(5);
  let isHeldBack = true;
  const more = thrifty.untilTokens(6).then(() => {
    isHeldBack = false;
  });
  // When the longer request has ended, the one without credit has had the time to end.
  await new CheckedStream(session.generate(greedy(60), CALL)).untilEnd();
  const numEarly = thrifty.numTokens;
  require(isHeldBack && numEarly === 5, "more than 5 tokens came for a credit of 5");
  thrifty.stream.grant(100);
  await more;
  await thrifty.untilEnd();
  require(thrifty.numTokens === 20, `${thrifty.numTokens} tokens with credit, not 20`);
  session.close();
}
