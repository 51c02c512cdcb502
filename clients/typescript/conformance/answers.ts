/** Scenarios about responses: streams, prompts, text and metadata. */

import { randomBytes } from "node:crypto";
import { chat as chatPrompt, text, tokenIds } from "../src/index.js";
import { CALL_MS, greedy, CheckedStream, newId, require, type ScenarioInput } from "./scenario.js";

const NUM_LARGE_TOKENS = 100_000;
const TEXT = "naïve 日本語 🚀";
const CALL = { deadlineMs: CALL_MS };

export async function streamInOrder(scenario: ScenarioInput): Promise<void> {
  const checked = new CheckedStream(scenario.client().generate(greedy(12), CALL));
  const finished = await checked.untilEnd();
  const accepted = await checked.untilAccepted();
  require(accepted.requestId !== "" && accepted.model !== "", "accepted without names");
  require(checked.numTokens === 12, `${checked.numTokens} tokens, not 12`);
  const numReported = finished.usage?.numCompletionTokens;
  require(numReported === 12, `usage reports ${numReported} tokens, not 12`);
  require(checked.finishReason === "LENGTH", `the reason is ${checked.finishReason}, not LENGTH`);
}

export async function onceEqualsStream(scenario: ScenarioInput): Promise<void> {
  const client = scenario.client();
  const checked = new CheckedStream(client.generate(greedy(32), CALL));
  await checked.untilEnd();
  const once = await client.generateOnce(greedy(32), CALL);
  const whole = once.outputs[0]?.text ?? "";
  require(whole ===
    checked.text, `${JSON.stringify(whole)} is not ${JSON.stringify(checked.text)}`);
  require(whole !== "", "there is no text");
  let pieces = "";
  for await (const piece of client.generateText(greedy(32), CALL)) pieces += piece;
  require(pieces === whole, "generateText has another text");
}

export async function tokenPrompt(scenario: ScenarioInput): Promise<void> {
  const client = scenario.client();
  const ids = Array.from({ length: 20 }, (_, index) => 5 + index);
  const answers: number[][] = [];
  for (let turn = 0; turn < 2; turn++) {
    const request = { ...greedy(12, tokenIds(ids)), output: { returnTokenIds: true } };
    const checked = new CheckedStream(client.generate(request, CALL));
    const { usage } = await checked.untilEnd();
    require(usage?.numPromptTokens === 20, `usage reports ${usage?.numPromptTokens} prompt tokens`);
    answers.push(checked.tokenIds);
  }
  const [first = [], second = []] = answers;
  require(first.length === 12, `${first.length} token ids, not 12`);
  require(first.join() === second.join(), `[${first}] the first time, [${second}] the second`);
}

export async function chat(scenario: ScenarioInput): Promise<void> {
  const turns = [
    { role: "system", content: "You answer in one sentence." },
    { role: "user", content: "Where is the Globe?" },
  ];
  const checked = new CheckedStream(
    scenario.client().generate(greedy(24, chatPrompt(turns)), CALL),
  );
  await checked.untilEnd();
  require(checked.text !== "", "there is no text");
  require(checked.numTokens === 24, `${checked.numTokens} tokens, not 24`);
}

export async function utf8AcrossChunks(scenario: ScenarioInput): Promise<void> {
  const client = scenario.client();
  const request = greedy(200, text(TEXT));
  const once = await client.generateOnce({ ...request, output: { echo: true } }, CALL);
  const checked = new CheckedStream(
    client.generate({ ...request, output: { echo: true, minChunkTokens: 1 } }, CALL),
  );
  await checked.untilEnd();
  for (const echoed of [once.prompt?.text, checked.promptText]) {
    require(echoed === TEXT, `the prompt came back as ${JSON.stringify(echoed)}`);
  }
  const whole = once.outputs[0]?.text ?? "";
  require(checked.text ===
    whole, `${JSON.stringify(checked.text)} is not ${JSON.stringify(whole)}`);
  require(/[^\x00-\x7f]/.test(whole), "the text has no character beyond ASCII");
  for (const { text: chunk } of checked.chunks) {
    // A lone surrogate cannot be encoded, so this throws.
    encodeURIComponent(chunk);
  }
}

export async function largePrompt(scenario: ScenarioInput): Promise<void> {
  const ids = Array.from({ length: NUM_LARGE_TOKENS }, (_, index) => 5 + (index % 1000));
  const checked = new CheckedStream(scenario.client().generate(greedy(4, tokenIds(ids)), CALL));
  const { usage } = await checked.untilEnd();
  const numReported = usage?.numPromptTokens;
  require(numReported === NUM_LARGE_TOKENS, `usage reports ${numReported} prompt tokens`);
  require(checked.numTokens === 4, `${checked.numTokens} tokens, not 4`);
}

export async function metadata(scenario: ScenarioInput): Promise<void> {
  const traceId = randomBytes(16).toString("hex");
  const requestId = newId();
  const trace = { traceparent: `00-${traceId}-${randomBytes(8).toString("hex")}-01` };
  const checked = new CheckedStream(
    scenario.client().generate({ ...greedy(4), requestId }, { ...CALL, trace }),
  );
  const accepted = await checked.untilAccepted();
  await checked.untilEnd();
  require(accepted.requestId === requestId, `accepted as ${accepted.requestId}`);
  require(accepted.traceId === traceId, `the trace id is ${accepted.traceId}, not ${traceId}`);
}
