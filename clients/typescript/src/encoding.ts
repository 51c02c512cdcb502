/** Encodes messages. Rejects values that do not fit their field, with the path of the field. */

import { ScalarType, toBinary, type DescMessage, type MessageShape } from "@bufbuild/protobuf";
import { reflect, type ReflectMessage } from "@bufbuild/protobuf/reflect";

/** Encodes a message. Throws TypeError, which names the field, if a value does not fit. */
export function encode<D extends DescMessage>(schema: D, message: MessageShape<D>): Buffer {
  requireUnicode(reflect(schema, message), "");
  try {
    return Buffer.from(toBinary(schema, message));
  } catch (error) {
    throw new TypeError(`the request does not fit the contract: ${(error as Error).message}`, {
      cause: error,
    });
  }
}

/** An unpaired surrogate has no UTF-8 encoding, and would arrive as another character. */
function requireUnicode(message: ReflectMessage, prefix: string): void {
  for (const field of message.fields) {
    if (!message.isSet(field)) continue;
    const path = `${prefix}${field.name}`;
    if (field.fieldKind === "message") {
      requireUnicode(message.get(field), `${path}.`);
    } else if (field.fieldKind === "scalar" && field.scalar === ScalarType.STRING) {
      requireText(message.get(field), path);
    } else if (field.fieldKind === "list" && field.listKind === "message") {
      let index = 0;
      for (const item of message.get(field)) {
        requireUnicode(item as ReflectMessage, `${path}[${index++}].`);
      }
    } else if (field.fieldKind === "list" && field.scalar === ScalarType.STRING) {
      let index = 0;
      for (const item of message.get(field)) requireText(item, `${path}[${index++}]`);
    }
  }
}

function requireText(value: unknown, path: string): void {
  // The text is not quoted, because prompts may be private.
  if (typeof value !== "string") throw new TypeError(`${path}: must be a string`);
  if (!value.isWellFormed()) throw new TypeError(`${path}: has an unpaired surrogate`);
}
