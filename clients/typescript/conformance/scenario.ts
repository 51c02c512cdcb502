/**
 * Shared by the scenarios: clients of the service, the check of a condition, and a stream that is
 * read message by message while its order is checked.
 */

import { randomUUID } from "node:crypto";
import {
  Client,
  FinishReason,
  NO_RETRY,
  text,
  type RequestAccepted,
  type ClientOptions,
  type RequestFinished,
  type GenerateInit,
  type GenerationStream,
  type TokenDelta,
} from "../src/index.js";

export const PROMPT = "The old lighthouse keeper climbed the stairs";
/** The deadline of calls that do not test deadlines; a scenario has 60 s. */
export const CALL_MS = 50_000;
export const LONG_TOKENS = 10_000;

/** A condition of a scenario does not hold. */
export class ExpectationFailed extends Error {}

export function require(holds: boolean, why: string): asserts holds {
  if (!holds) throw new ExpectationFailed(why);
}

/** Returns a unique request id. */
export function newId(): string {
  return `conformance-${randomUUID()}`;
}

/** Requests exactly this number of tokens, which depend only on the prompt. */
export function greedy(maxTokens: number, prompt: GenerateInit["prompt"] = text(PROMPT)) {
  return {
    prompt,
    sampling: { temperature: 0 },
    stopping: { maxTokens, ignoreEos: true },
  } satisfies GenerateInit;
}

/** Passed to each scenario. Its clients are closed at the end of the scenario. */
export class ScenarioInput {
  readonly #clients: Client[] = [];
  readonly address: string;
  /** Reports to the driver that the scenario is ready. */
  readonly ready: () => void;
  /** Reports to the driver that the scenario is ready, and waits for the command to continue. */
  readonly untilGo: () => Promise<void>;

  constructor(address: string, ready: () => void, untilGo: () => Promise<void>) {
    this.address = address;
    this.ready = ready;
    this.untilGo = untilGo;
  }

  /** Returns a client with a separate connection and without retries. */
  client(options: ClientOptions = {}): Client {
    const client = new Client(this.address, { retry: NO_RETRY, ...options });
    this.#clients.push(client);
    return client;
  }

  end(): void {
    for (const client of this.#clients) client.close();
  }
}

/** The messages of one stream, each checked against the previous one. */
export class CheckedStream<S extends GenerationStream = GenerationStream> {
  readonly stream: S;
  readonly chunks: TokenDelta[] = [];
  accepted: RequestAccepted | undefined;
  finished: RequestFinished | undefined;
  promptText = "";
  #nextSequence: bigint;

  constructor(stream: S) {
    this.stream = stream;
    this.#nextSequence = stream.point.nextSequence;
  }

  get text(): string {
    return this.chunks.map((chunk) => chunk.text).join("");
  }

  get numTokens(): number {
    return this.chunks.reduce((sum, chunk) => sum + chunk.numTokens, 0);
  }

  get tokenIds(): number[] {
    return this.chunks.flatMap((chunk) => chunk.records.map((record) => record.id));
  }

  /** Returns the name of the first output's finish reason, "" if there is none. */
  get finishReason(): string {
    const reason = this.finished?.outputs[0]?.finishReason;
    return reason === undefined ? "" : (FinishReason[reason] ?? "");
  }

  async untilAccepted(): Promise<RequestAccepted> {
    while (!this.accepted) await this.#read();
    return this.accepted;
  }

  async untilTokens(numTokens = 1): Promise<void> {
    while (this.numTokens < numTokens) await this.#read();
  }

  /** Reads to the end, past the last message. */
  async untilEnd(): Promise<RequestFinished> {
    while (!this.finished) await this.#read();
    const late = await this.stream.next();
    require(late.done === true, "received a message after finished");
    return this.finished;
  }

  async #read(): Promise<void> {
    const { done, value } = await this.stream.next();
    require(!done, "the stream ended without finished");
    const { sequence, event } = value;
    require(sequence === this.#nextSequence, `sequence ${sequence}, not ${this.#nextSequence}`);
    require((event.case === "accepted") ===
      (sequence === 0n), `message ${sequence}: ${event.case}`);
    this.#nextSequence += 1n;
    if (event.case === "accepted") this.accepted = event.value;
    else if (event.case === "prompt") this.promptText += event.value.text;
    else if (event.case === "tokens") this.chunks.push(event.value);
    else if (event.case === "finished") this.finished = event.value;
  }
}
