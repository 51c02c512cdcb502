/**
 * Checks that a stream conforms to the protocol: sequence numbers, order, one `finished` at the
 * end. Does no I/O.
 */

import { streamBroken } from "./errors.js";
import type { GenerateResponse } from "./generated/penstock/v1/generation_service_pb.js";
import type { ResumePoint } from "./resume.js";

export class StreamReader {
  readonly #receivedTokenCounts: number[];
  #nextSequence: bigint;
  #finished: GenerateResponse | undefined;
  requestId: string;
  /** Whether any output was delivered. */
  hasOutput = false;

  constructor(point?: ResumePoint) {
    this.requestId = point?.requestId ?? "";
    this.#nextSequence = point?.nextSequence ?? 0n;
    this.#receivedTokenCounts = [...(point?.receivedTokenCounts ?? [])];
  }

  /** Whether `finished` was received. */
  get isFinished(): boolean {
    return this.#finished !== undefined;
  }

  /**
   * The position at which the stream continues. A `finished` is included only if the status is OK.
   */
  get point(): ResumePoint {
    return {
      requestId: this.requestId,
      nextSequence: this.#nextSequence,
      receivedTokenCounts: [...this.#receivedTokenCounts],
    };
  }

  /** Returns where the next attempt resumes: before a `finished` whose status was lost. */
  nextPoint(): ResumePoint {
    this.#finished = undefined;
    return this.point;
  }

  /**
   * Checks the next message. Returns whether to deliver it now. Events that this client does not
   * know are skipped. `finished` is held back for `end`, because it is valid only if the status is
   * OK.
   */
  receive(response: GenerateResponse): boolean {
    const { event, sequence } = response;
    if (this.#finished) this.#break("received a message after `finished`");
    if (sequence !== this.#nextSequence) {
      this.#break(`expected message ${this.#nextSequence}, got ${sequence}`);
    }
    if ((sequence === 0n) !== (event.case === "accepted")) {
      this.#break("`accepted` must be the first message, once");
    }
    if (event.case === "finished") {
      this.#finished = response;
      return false;
    }
    this.#nextSequence += 1n;
    switch (event.case) {
      case "accepted":
        this.requestId = event.value.requestId;
        return true;
      case "tokens":
        this.hasOutput = true;
        this.#count(event.value.outputIndex, event.value.numTokens);
        return true;
      case "prompt":
        this.hasOutput = true;
        return true;
      default:
        return event.case !== undefined;
    }
  }

  /** Returns the last message, after the stream has ended with status OK. */
  end(): GenerateResponse {
    const finished =
      this.#finished ??
      this.#break(`the stream ended without \`finished\` after ${this.#nextSequence} messages`);
    this.#nextSequence += 1n;
    return finished;
  }

  #count(outputIndex: number, numTokens: number): void {
    while (this.#receivedTokenCounts.length <= outputIndex) this.#receivedTokenCounts.push(0);
    this.#receivedTokenCounts[outputIndex] =
      (this.#receivedTokenCounts[outputIndex] ?? 0) + numTokens;
  }

  #break(message: string): never {
    throw streamBroken(message, this.requestId);
  }
}
