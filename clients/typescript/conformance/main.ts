/**
 * The conformance program: reads names of scenarios from stdin and writes a line of JSON for each
 * to stdout. Each scenario has a time limit.
 */

import { createInterface } from "node:readline";
import { parseArgs } from "node:util";
import * as answers from "./answers.js";
import * as requestEnds from "./request-ends.js";
import { multiplex } from "./multiplexing.js";
import * as rejections from "./rejections.js";
import { ExpectationFailed, ScenarioInput } from "./scenario.js";

const SCENARIO_MS = 60_000;

const CHECKS: Readonly<Record<string, (scenario: ScenarioInput) => Promise<void>>> = {
  stream_in_order: answers.streamInOrder,
  once_equals_stream: answers.onceEqualsStream,
  token_prompt: answers.tokenPrompt,
  chat: answers.chat,
  utf8_across_chunks: answers.utf8AcrossChunks,
  large_prompt: answers.largePrompt,
  invalid_field: rejections.invalidField,
  unknown_model: rejections.unknownModel,
  unimplemented_feature: rejections.unimplementedFeature,
  duplicate_request_id: rejections.duplicateRequestId,
  cancel_after_first_token: requestEnds.cancelAfterFirstToken,
  cancel_by_id: requestEnds.cancelById,
  deadline: requestEnds.deadline,
  queue_full: rejections.queueFull,
  metadata: answers.metadata,
  multiplex,
  resume: requestEnds.resume,
  retry_after_rejection: rejections.retryAfterRejection,
  engine_killed: requestEnds.engineKilled,
  drain: requestEnds.drain,
};

async function main(): Promise<void> {
  const { values } = parseArgs({ options: { address: { type: "string" } } });
  let address = values.address;
  if (address === undefined) throw new TypeError("--address HOST:PORT is required");
  const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
  for (;;) {
    const { value: line, done } = await lines.next();
    if (done) return;
    const [word = "", rest = ""] = line.trim().split(" ", 2);
    if (word === "address") address = rest;
    else if (word !== "") writeLine({ scenario: word, ...(await outcome(word, address, lines)) });
  }
}

async function outcome(name: string, address: string, lines: AsyncIterator<string>) {
  const check = Object.hasOwn(CHECKS, name) ? CHECKS[name] : undefined;
  if (!check) return { outcome: "failed", why: "no such scenario" };
  const ready = (): void => writeLine({ scenario: name, event: "ready" });
  const untilGo = async (): Promise<void> => {
    ready();
    const { value: line } = await lines.next();
    if (line?.trim() !== "go") throw new ExpectationFailed(`expected go, not ${line}`);
  };
  const scenario = new ScenarioInput(address, ready, untilGo);
  try {
    await bounded(check(scenario));
    return { outcome: "passed" };
  } catch (error) {
    if (!(error instanceof ExpectationFailed)) console.error(error);
    const why = error instanceof ExpectationFailed ? error.message : String(error);
    return { outcome: "failed", why };
  } finally {
    scenario.end();
  }
}

async function bounded(check: Promise<void>): Promise<void> {
  let timer: NodeJS.Timeout | undefined;
  const expiry = new Promise<never>((_, reject) => {
    const why = new ExpectationFailed(`not done within ${SCENARIO_MS / 1000} s`);
    timer = setTimeout(() => reject(why), SCENARIO_MS);
  });
  try {
    await Promise.race([check, expiry]);
  } finally {
    clearTimeout(timer);
  }
}

function writeLine(line: Readonly<Record<string, string>>): void {
  process.stdout.write(`${JSON.stringify(line)}\n`);
}

await main();
