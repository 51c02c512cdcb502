/**
 * What the scenarios share: clients of the service, the way to state that something did not hold,
 * and
 * a stream that is read piece by piece while its order is checked. Knows nothing of any one scenario.
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
/** The deadline of calls that are not about deadlines; a scenario has 60 s. */
export const CALL_MS = 50_000;
export const LONG_TOKENS = 10_000;

/** What a scenario asks did not hold. */
export class NotHeld extends Error {}

export function require(holds: boolean, why: string): asserts holds {
  if (!holds) throw new NotHeld(why);
}

/** A request id that no client else has. */
export function newId(): string {
  return `conformance-${randomUUID()}`;
}

/** Exactly so many tokens, a function of the prompt. */
export function greedy(maxTokens: number, prompt: GenerateInit["prompt"] = text(PROMPT)) {
  return {
    prompt,
    sampling: { temperature: 0 },
    stopping: { maxTokens, ignoreEos: true },
  } satisfies GenerateInit;
}

/** What one scenario gets: its clients end with it. */
export class Talk {
  readonly #clients: Client[] = [];
  readonly address: string;
  /** States that the driver may act. */
  readonly ready: () => void;
  /** States so, and waits until it has. */
  readonly untilGo: () => Promise<void>;

  constructor(address: string, ready: () => void, untilGo: () => Promise<void>) {
    this.address = address;
    this.ready = ready;
    this.untilGo = untilGo;
  }

  /** A client with a separate connection, which reports every failure at once. */
  client(options: ClientOptions = {}): Client {
    const client = new Client(this.address, { retry: NO_RETRY, ...options });
    this.#clients.push(client);
    return client;
  }

  end(): void {
    for (const client of this.#clients) client.close();
  }
}

/** The messages of one stream as they are read, each checked against the one before. */
export class Heard<S extends GenerationStream = GenerationStream> {
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

  /** Name of the first output's finish reason, "" while there is none. */
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

  /** Read to the end, past the last message. */
  async untilEnd(): Promise<RequestFinished> {
    while (!this.finished) await this.#read();
    const late = await this.stream.next();
    require(late.done === true, "a message came after finished");
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
