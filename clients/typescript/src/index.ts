/** The TypeScript client of Penstock. Exports all public names. */

export { status as StatusCode } from "@grpc/grpc-js";
export { Client, type CallOptions, type ClientOptions, type ResumeOptions } from "./client.js";
export { type ChannelSettings } from "./channel.js";
export { type TlsOptions, type Token } from "./credentials.js";
export { PenstockError, type FieldViolation, type Reason } from "./errors.js";
export { GenerationStream } from "./generation-stream.js";
export { type Headers } from "./headers.js";
export {
  MultiplexSession,
  MultiplexStream,
  type MultiplexCallOptions,
} from "./multiplex-session.js";
export { type MultiplexOptions } from "./multiplexer.js";
export { chat, milliseconds, text, tokenIds, type ChatTurn, type GenerateInit } from "./prompts.js";
export { type ResumePoint } from "./resume.js";
export { DEFAULT_RETRY, NO_RETRY, type RetryPolicy } from "./retry.js";
export { type Timing } from "./timing.js";
export { type TraceContext } from "./trace-context.js";
export { type ConnectionOptions } from "./transport.js";

// The API: message types, enums and schemas.
export * from "./generated/penstock/v1/error_pb.js";
export * from "./generated/penstock/v1/generation_service_pb.js";
export * from "./generated/penstock/v1/model_pb.js";
export * from "./generated/penstock/v1/model_service_pb.js";
export * from "./generated/penstock/v1/options_pb.js";
export * from "./generated/penstock/v1/output_pb.js";
export * from "./generated/penstock/v1/prompt_pb.js";
export * from "./generated/penstock/v1/state_pb.js";
