/**
 * A GenerationService on a real socket, whose responses a test writes, and a proxy before it, whose
 * connections can be cut.
 */

import { once } from "node:events";
import {
  connect,
  createServer,
  type AddressInfo,
  type Server as NetServer,
  type Socket,
} from "node:net";
import {
  create,
  fromBinary,
  toBinary,
  type DescMessage,
  type MessageInitShape,
} from "@bufbuild/protobuf";
import {
  Metadata,
  Server,
  ServerCredentials,
  status as Codes,
  type MethodDefinition,
  type ServerDuplexStream,
  type ServerWritableStream,
  type UntypedHandleCall,
} from "@grpc/grpc-js";
import { StatusSchema } from "../src/generated/google/rpc/status_pb.js";
import { ErrorInfoSchema, RetryInfoSchema } from "../src/generated/google/rpc/error_details_pb.js";
import {
  GenerationService,
  GenerateResponseSchema,
  ResumeResponseSchema,
  type CancelRequest,
  type CancelResponse,
  type GenerateRequest,
  type GenerateResponse,
  type MultiplexRequest,
  type MultiplexResponse,
  type ResumeRequest,
  type ResumeResponse,
} from "../src/index.js";

export type GenerateCall = ServerWritableStream<GenerateRequest, GenerateResponse>;
export type ResumeCall = ServerWritableStream<ResumeRequest, ResumeResponse>;
export type MultiplexCall = ServerDuplexStream<MultiplexRequest, MultiplexResponse>;

/** The handlers of the service. A call without a handler fails with UNIMPLEMENTED. */
export interface Handlers {
  generate?: (call: GenerateCall) => void;
  resume?: (call: ResumeCall) => void;
  multiplex?: (call: MultiplexCall) => void;
  cancel?: (
    request: CancelRequest,
  ) => MessageInitShape<typeof GenerationService.method.cancel.output>;
}

/** A service, and the proxy through which clients reach it. */
export class FakeService {
  readonly #server: Server;
  readonly #proxy: NetServer;
  readonly #sockets: Set<Socket>;
  readonly address: string;

  private constructor(server: Server, proxy: NetServer, sockets: Set<Socket>) {
    this.#server = server;
    this.#proxy = proxy;
    this.#sockets = sockets;
    this.address = `127.0.0.1:${(proxy.address() as AddressInfo).port}`;
  }

  static async start(handlers: Handlers): Promise<FakeService> {
    const server = new Server();
    server.addService(definition(), implementation(handlers));
    const port = await new Promise<number>((resolve, reject) => {
      const credentials = ServerCredentials.createInsecure();
      server.bindAsync("127.0.0.1:0", credentials, (error, bound) =>
        error ? reject(error) : resolve(bound),
      );
    });
    const sockets = new Set<Socket>();
    const proxy = createServer((socket) => {
      const upstream = connect(port, "127.0.0.1");
      for (const [from, to] of [
        [socket, upstream],
        [upstream, socket],
      ] as const) {
        sockets.add(from);
        from.on("error", () => to.destroy());
        from.on("close", () => {
          sockets.delete(from);
          to.destroy();
        });
        from.pipe(to);
      }
    });
    proxy.listen(0, "127.0.0.1");
    await once(proxy, "listening");
    return new FakeService(server, proxy, sockets);
  }

  /** Cuts all connections at once, like the crash of a machine. */
  cut(): void {
    for (const socket of this.#sockets) socket.resetAndDestroy();
  }

  stop(): void {
    this.#proxy.close();
    for (const socket of this.#sockets) socket.destroy();
    this.#server.forceShutdown();
  }
}

/** Returns a message of a stream: one token, whose text is its sequence number. */
export function tokensAt(sequence: number): GenerateResponse {
  return create(GenerateResponseSchema, {
    sequence: BigInt(sequence),
    event: { case: "tokens", value: { text: `${sequence} `, numTokens: 1 } },
  });
}

export function acceptedAs(requestId: string): GenerateResponse {
  return create(GenerateResponseSchema, { event: { case: "accepted", value: { requestId } } });
}

export function finishedAt(sequence: number): GenerateResponse {
  return create(GenerateResponseSchema, {
    sequence: BigInt(sequence),
    event: { case: "finished", value: {} },
  });
}

export function resumedWith(response: GenerateResponse): ResumeResponse {
  return create(ResumeResponseSchema, { response });
}

/** Returns the status of a rejected call, as a server sends it. */
export function rejection(code: Codes, reason: string, retryAfterMs?: number) {
  const info = packed(ErrorInfoSchema, {
    reason,
    domain: "penstock.dev",
    metadata: { key: "value" },
  });
  const nanos = (retryAfterMs ?? 0) * 1e6;
  const retry = packed(RetryInfoSchema, { retryDelay: { seconds: 0n, nanos } });
  const details = retryAfterMs === undefined ? [info] : [info, retry];
  const status = create(StatusSchema, { code, message: "rejected", details });
  const metadata = new Metadata();
  metadata.set("grpc-status-details-bin", Buffer.from(toBinary(StatusSchema, status)));
  return { code, details: "rejected", metadata };
}

function packed<D extends DescMessage>(schema: D, init: MessageInitShape<D>) {
  const value = toBinary(schema, create(schema, init));
  return { typeUrl: `type.googleapis.com/${schema.typeName}`, value };
}

function implementation(handlers: Handlers): Record<string, UntypedHandleCall> {
  const { cancel } = handlers;
  const unimplemented = (call: { emit(name: string, status: object): unknown }): void => {
    call.emit("error", { code: Codes.UNIMPLEMENTED, details: "not in this test" });
  };
  return {
    generate: handlers.generate ?? unimplemented,
    resume: handlers.resume ?? unimplemented,
    multiplex: handlers.multiplex ?? unimplemented,
    cancel: (
      call: { request: CancelRequest },
      answer: (error: object | null, response?: CancelResponse) => void,
    ) => {
      if (!cancel) answer({ code: Codes.UNIMPLEMENTED, details: "not in this test" });
      else answer(null, create(GenerationService.method.cancel.output, cancel(call.request)));
    },
  } as Record<string, UntypedHandleCall>;
}

function definition(): Record<string, MethodDefinition<unknown, unknown>> {
  const named = GenerationService.methods.map((method) => {
    const { input, output, methodKind } = method;
    return [
      method.localName,
      {
        path: `/${GenerationService.typeName}/${method.name}`,
        requestStream: methodKind === "bidi_streaming",
        responseStream: methodKind !== "unary",
        requestSerialize: (message: unknown) => Buffer.from(toBinary(input, message as never)),
        requestDeserialize: (bytes: Buffer) => fromBinary(input, bytes),
        responseSerialize: (message: unknown) => Buffer.from(toBinary(output, message as never)),
        responseDeserialize: (bytes: Buffer) => fromBinary(output, bytes),
      },
    ] as const;
  });
  return Object.fromEntries(named);
}
