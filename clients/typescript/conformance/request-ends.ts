/**
 * Scenarios about the end of requests (cancels, deadlines), and about failures that they survive.
 */

import { PenstockError, RequestState } from "../src/index.js";
import { rejected } from "./rejections.js";
import {
  CALL_MS,
  greedy,
  CheckedStream,
  LONG_TOKENS,
  newId,
  ExpectationFailed,
  PROMPT,
  require,
  type ScenarioInput,
} from "./scenario.js";
import type { Client } from "../src/index.js";
import { milliseconds, text } from "../src/index.js";

const CALL = { deadlineMs: CALL_MS };
const ENDED_WITHIN_MS = 20_000;

export async function cancelAfterFirstToken(scenario: ScenarioInput): Promise<void> {
  const client = scenario.client();
  const requestId = newId();
  const leaving = new AbortController();
  const call = { ...CALL, signal: leaving.signal };
  const checked = new CheckedStream(client.generate({ ...greedy(LONG_TOKENS), requestId }, call));
  await checked.untilTokens();
  leaving.abort();
  await rejected(checked.untilEnd(), "CANCELLED", "");
  await untilIdIsFree(client, requestId);
}

async function untilIdIsFree(client: Client, requestId: string): Promise<void> {
  const lastMs = performance.now() + ENDED_WITHIN_MS;
  while (performance.now() < lastMs) {
    try {
      await client.generateOnce({ ...greedy(1), requestId }, CALL);
      return;
    } catch (error) {
      if (error instanceof PenstockError && error.reason === "REQUEST_ID_IN_USE") continue;
      throw error;
    }
  }
  throw new ExpectationFailed(
    `the request is still live ${ENDED_WITHIN_MS} ms after its call ended`,
  );
}

export async function cancelById(scenario: ScenarioInput): Promise<void> {
  const requestId = newId();
  const checked = new CheckedStream(
    scenario.client().generate({ ...greedy(LONG_TOKENS), requestId }, CALL),
  );
  await checked.untilTokens();
  const state = await scenario.client().cancel(requestId);
  require(state === RequestState.PROCESSING, `Cancel found it in ${RequestState[state]}`);
  await checked.untilEnd();
  require(checked.finishReason === "CANCELLED", `the reason is ${checked.finishReason}`);
}

export async function deadline(scenario: ScenarioInput): Promise<void> {
  const beganMs = performance.now();
  const checked = new CheckedStream(
    scenario.client().generate(greedy(LONG_TOKENS), { deadlineMs: 1000 }),
  );
  try {
    await checked.untilEnd();
  } catch (error) {
    if (!(error instanceof PenstockError)) throw error;
    require(error.codeName === "DEADLINE_EXCEEDED", `it failed with ${error.message}`);
    const tookMs = performance.now() - beganMs;
    require(tookMs < ENDED_WITHIN_MS, `it took ${tookMs} ms`);
    return;
  }
  throw new ExpectationFailed("it ended well");
}

export async function resume(scenario: ScenarioInput): Promise<void> {
  const numTokens = 200;
  const lost = scenario.client();
  const once = await lost.generateOnce(greedy(numTokens), CALL);
  const before = new CheckedStream(
    lost.generate({ ...greedy(numTokens), resumeTimeout: milliseconds(30_000) }),
  );
  await before.untilTokens(20);
  const { point } = before.stream;
  lost.close();
  require(!before.finished, "it had ended before it was cut");
  const rest = new CheckedStream(scenario.client().resume(point, CALL));
  await rest.untilEnd();
  const total = before.numTokens + rest.numTokens;
  require(total === numTokens, `${total} tokens, not ${numTokens}`);
  const whole = before.text + rest.text;
  require(whole === once.outputs[0]?.text, `${JSON.stringify(whole)} is another text`);
}

export async function engineKilled(scenario: ScenarioInput): Promise<void> {
  const client = scenario.client({ retry: { maxAttempts: 8 } });
  const request = greedy(400, text(PROMPT));
  const checked = new CheckedStream(client.generate(request, CALL));
  await checked.untilTokens();
  scenario.ready();
  await checked.untilEnd();
  const once = await client.generateOnce(request, CALL);
  require(checked.numTokens === 400, `${checked.numTokens} tokens, not 400`);
  require(checked.text === once.outputs[0]?.text, "the text is another than GenerateOnce's");
}

export async function drain(scenario: ScenarioInput): Promise<void> {
  const client = scenario.client();
  const numTokens = 300;
  const checked = new CheckedStream(client.generate(greedy(numTokens), CALL));
  await checked.untilTokens();
  await scenario.untilGo();
  try {
    await client.generateOnce(greedy(4), CALL);
    throw new ExpectationFailed("a new request was served");
  } catch (error) {
    if (!(error instanceof PenstockError)) throw error;
    const isRight = error.codeName === "UNAVAILABLE" && ["", "DRAINING"].includes(error.reason);
    require(isRight, `rejected with ${error.message}`);
  }
  await checked.untilEnd();
  require(checked.numTokens === numTokens, `${checked.numTokens} tokens, not ${numTokens}`);
}
