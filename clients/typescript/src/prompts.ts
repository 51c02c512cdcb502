/** Short forms of the parts of requests. */

import { durationFromMs, type Duration } from "@bufbuild/protobuf/wkt";
import type { MessageInitShape } from "@bufbuild/protobuf";
import type { GenerateRequestSchema } from "./generated/penstock/v1/generation_service_pb.js";

/** A generation as a plain object. Field names and defaults are those of the API. */
export type GenerateInit = MessageInitShape<typeof GenerateRequestSchema>;

/** One message of a conversation. */
export interface ChatTurn {
  readonly role: string;
  readonly content: string;
}

/** Returns plain text as a prompt. */
export function text(value: string) {
  return { case: "textPrompt", value: { text: value } } as const satisfies GenerateInit["prompt"];
}

/** Returns token ids as a prompt. */
export function tokenIds(ids: Iterable<number>) {
  return {
    case: "tokenPrompt",
    value: { ids: [...ids] },
  } as const satisfies GenerateInit["prompt"];
}

/** Returns a conversation as a prompt. Its oldest messages are dropped to fit `windowTokens`. */
export function chat(turns: Iterable<ChatTurn>, options: { readonly windowTokens?: number } = {}) {
  return {
    case: "chatPrompt",
    value: { messages: [...turns].map(message), ...options },
  } as const satisfies GenerateInit["prompt"];
}

function message({ role, content }: ChatTurn) {
  return { role, parts: [{ content: { case: "text", value: content } as const }] };
}

/** Returns a duration of the API. Throws RangeError unless it is finite. */
export function milliseconds(value: number): Duration {
  if (!Number.isFinite(value)) throw new RangeError(`a duration must be finite, not ${value}`);
  return durationFromMs(Math.round(value));
}
