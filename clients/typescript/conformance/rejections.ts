/** Scenarios about rejected requests, and about the details in their errors. */

import { PenstockError, type Client, type Timing } from "../src/index.js";
import { SYSTEM_TIMING } from "../src/timing.js";
import {
  CALL_MS,
  greedy,
  CheckedStream,
  LONG_TOKENS,
  newId,
  ExpectationFailed,
  require,
  type ScenarioInput,
} from "./scenario.js";

const NUM_PLACES = 4;
const NUM_WAITING = 4;
const MAX_WAIT_MS = 50;
const CALL = { deadlineMs: CALL_MS };

/** Returns the failure of a call, which must have this status and reason. */
export async function rejected(
  call: Promise<unknown>,
  codeName: string,
  reason: string,
): Promise<PenstockError> {
  try {
    await call;
  } catch (error) {
    if (!(error instanceof PenstockError)) throw error;
    const isThis = error.codeName === codeName && error.reason === reason;
    require(isThis, `not ${codeName} (${reason}) but ${error.message}`);
    return error;
  }
  throw new ExpectationFailed(`it was answered, not rejected with ${codeName}`);
}

export async function invalidField(scenario: ScenarioInput): Promise<void> {
  const request = { ...greedy(4), sampling: { temperature: -1 } };
  const call = scenario.client().generateOnce(request, CALL);
  const error = await rejected(call, "INVALID_ARGUMENT", "INVALID_ARGUMENT");
  const fields = error.fieldViolations.map((violation) => violation.field);
  require(fields.includes("sampling.temperature"), `the fields are ${fields}`);
}

export async function unknownModel(scenario: ScenarioInput): Promise<void> {
  const call = scenario.client().generateOnce({ ...greedy(4), model: "no-such-model" }, CALL);
  const { info } = await rejected(call, "NOT_FOUND", "MODEL_NOT_FOUND");
  require(info["model"] === "no-such-model", `ErrorInfo names the model ${info["model"]}`);
}

export async function unimplementedFeature(scenario: ScenarioInput): Promise<void> {
  const { prompt } = greedy(4);
  const kind = { case: "jsonSchema", value: { schema: '{"type": "object"}' } } as const;
  const call = scenario.client().generateOnce({ prompt, constraint: { kind } }, CALL);
  const { info } = await rejected(call, "UNIMPLEMENTED", "FEATURE_UNSUPPORTED");
  require(info["feature"] === "json_schema", `ErrorInfo names the feature ${info["feature"]}`);
}

export async function duplicateRequestId(scenario: ScenarioInput): Promise<void> {
  const client = scenario.client();
  const requestId = newId();
  const first = new CheckedStream(client.generate({ ...greedy(100), requestId }, CALL));
  await first.untilTokens();
  const second = client.generateOnce({ ...greedy(4), requestId }, CALL);
  await rejected(second, "ALREADY_EXISTS", "REQUEST_ID_IN_USE");
  await first.untilEnd();
  require(first.numTokens === 100, `the first had ${first.numTokens} tokens, not 100`);
}

export async function queueFull(scenario: ScenarioInput): Promise<void> {
  const client = scenario.client();
  const blockers = await fillQueue(client);
  const ninth = client.generateOnce(greedy(4), CALL);
  try {
    const error = await rejected(ninth, "RESOURCE_EXHAUSTED", "QUEUE_FULL");
    require((error.retryAfterMs ?? 0) > 0, `RetryInfo has ${error.retryAfterMs} ms`);
  } finally {
    await leaveAll(blockers);
  }
  // A front receives free capacity one step later.
  const retrying = scenario.client({
    retry: { maxAttempts: 20 },
    timing: hurried(Promise.resolve()),
  });
  await retrying.generateOnce(greedy(1));
}

export async function retryAfterRejection(scenario: ScenarioInput): Promise<void> {
  let reportLeft = (): void => undefined;
  const haveLeft = new Promise<void>((resolve) => {
    reportLeft = resolve;
  });
  let reportRejected = (): void => undefined;
  const isRejected = new Promise<void>((resolve) => {
    reportRejected = resolve;
  });
  const timing = hurried(haveLeft, reportRejected);
  const retrying = scenario.client({ retry: { maxAttempts: 20 }, timing });
  const blockers = await fillQueue(scenario.client());
  const late = retrying.generateOnce(greedy(8));
  try {
    await Promise.race([isRejected, late]);
  } finally {
    await leaveAll(blockers);
    reportLeft();
  }
  const numTokens = (await late).finished?.usage?.numCompletionTokens;
  require(numTokens === 8, `${numTokens} tokens, not 8`);
}

/**
 * Timing of a client that waits for free capacity instead of the server's predicted delay, which
 * depends on earlier requests and may be longer than a scenario. `onWait` is called at each wait.
 */
function hurried(haveLeft: Promise<void>, onWait = (): void => undefined): Timing {
  const sleep = async (delayMs: number, signal: AbortSignal): Promise<void> => {
    onWait();
    await haveLeft;
    await SYSTEM_TIMING.sleep(Math.min(delayMs, MAX_WAIT_MS), signal);
  };
  return { ...SYSTEM_TIMING, sleep };
}

/** Submits eight long requests: four that have tokens, then four that wait. */
async function fillQueue(client: Client): Promise<CheckedStream[]> {
  const blockers: CheckedStream[] = [];
  for (let number = 0; number < NUM_PLACES + NUM_WAITING; number++) {
    const blocker = new CheckedStream(client.generate(greedy(LONG_TOKENS), CALL));
    blockers.push(blocker);
    await blocker.untilAccepted();
    if (number < NUM_PLACES) await blocker.untilTokens();
  }
  return blockers;
}

async function leaveAll(blockers: readonly CheckedStream[]): Promise<void> {
  for (const blocker of blockers) await blocker.stream.return();
}
