/**
 * Calls of grpc-js, typed by the generated descriptors. Owns the channel, the metadata of calls and
 * the set of open calls. Does not retry: each call here is one attempt.
 */

import {
  fromBinary,
  type DescMessage,
  type DescMethodBiDiStreaming,
  type DescMethodServerStreaming,
  type DescMethodUnary,
  type MessageShape,
} from "@bufbuild/protobuf";
import {
  Client as GrpcClient,
  Metadata,
  type CallOptions,
  type ClientDuplexStream,
  type ClientReadableStream,
} from "@grpc/grpc-js";
import { channelOptions, grpcTarget, type ChannelSettings } from "./channel.js";
import {
  authorization,
  channelCredentials,
  checkToken,
  type TlsOptions,
  type Token,
} from "./credentials.js";
import { callCancelled } from "./errors.js";
import { setHeaders, type Headers } from "./headers.js";
import { addTrace, checkedTrace, type TraceContext } from "./trace-context.js";

/** The address of the server, and the settings of all calls. */
export interface ConnectionOptions {
  readonly token?: Token;
  /** True: TLS with the certificate authorities of Node. Default: plain text. */
  readonly tls?: boolean | TlsOptions;
  /** Sent with all calls. If it has an `authorization`, no token is sent. */
  readonly metadata?: Headers;
  /** Called for the trace of each call without one, e.g. from OpenTelemetry. */
  readonly trace?: () => TraceContext | undefined;
  readonly channel?: ChannelSettings;
}

/** Options of one call. */
export interface CallContext {
  readonly metadata?: Headers | undefined;
  readonly trace?: TraceContext | undefined;
}

/** One attempt at a stream. */
export interface Attempt<T> {
  readonly responses: AsyncIterable<T>;
  /** Initial metadata of the response. Available after the first response. */
  readonly headers: Metadata | undefined;
  cancel(): void;
}

interface Cancellable {
  cancel(): void;
}

export class Transport {
  readonly #client: GrpcClient;
  readonly #options: ConnectionOptions;
  readonly #open = new Set<Cancellable>();
  isClosed = false;

  constructor(address: string, options: ConnectionOptions) {
    const target = grpcTarget(address);
    const tls = options.tls ?? false;
    checkToken(options.token, target, tls !== false);
    setHeaders(new Metadata(), options.metadata ?? {});
    const settings = channelOptions(target, options.channel ?? {});
    this.#client = new GrpcClient(target, channelCredentials(tls), settings);
    this.#options = options;
  }

  /** Cancels open calls and closes the connection. */
  close(): void {
    this.isClosed = true;
    for (const call of [...this.#open]) call.cancel();
    this.#client.close();
  }

  /** Throws PenstockError (CANCELLED) after the client was closed. */
  requireOpen(): void {
    if (this.isClosed) throw callCancelled("the client was closed");
  }

  /**
   * Throws TypeError, which names an option of a call that cannot be sent, before the first
   * attempt.
   */
  check(context: CallContext): void {
    setHeaders(new Metadata(), context.metadata ?? {});
    checkedTrace(context.trace);
  }

  /** Metadata of a call: that of the client, that of the call, the token, and the trace. */
  async metadata(context: CallContext): Promise<Metadata> {
    const metadata = await this.sharedMetadata(context.metadata);
    const isTraced = !context.trace && metadata.get("traceparent").length > 0;
    if (!isTraced) addTrace(metadata, this.traceOf(context));
    return metadata;
  }

  /** The trace of a call: its own, or the current one of this client. Throws TypeError. */
  traceOf(context: CallContext): TraceContext | undefined {
    return checkedTrace(context.trace ?? this.#options.trace?.());
  }

  /** Metadata of a call that is shared by several traces. */
  async sharedMetadata(own: Headers = {}): Promise<Metadata> {
    const { token, metadata: shared = {} } = this.#options;
    const metadata = new Metadata();
    setHeaders(metadata, { ...shared, ...own });
    if (token !== undefined && metadata.get("authorization").length === 0) {
      metadata.set("authorization", await authorization(token));
    }
    return metadata;
  }

  async unary<I extends DescMessage, O extends DescMessage>(
    method: DescMethodUnary<I, O>,
    request: Buffer,
    context: CallContext,
    timeoutMs: number | undefined,
    signal: AbortSignal | undefined,
  ): Promise<MessageShape<O>> {
    const metadata = await this.metadata(context);
    this.requireOpen();
    signal?.throwIfAborted();
    return new Promise((resolve, reject) => {
      const onAbort = (): void => call.cancel();
      const call = this.#client.makeUnaryRequest(
        pathOf(method),
        identity,
        decoder(method.output),
        request,
        metadata,
        withDeadline(timeoutMs),
        (error, response) => {
          this.#open.delete(call);
          signal?.removeEventListener("abort", onAbort);
          if (error) reject(error);
          else resolve(response as MessageShape<O>);
        },
      );
      this.#open.add(call);
      signal?.addEventListener("abort", onAbort, { once: true });
    });
  }

  async stream<I extends DescMessage, O extends DescMessage>(
    method: DescMethodServerStreaming<I, O>,
    request: Buffer,
    context: CallContext,
    timeoutMs: number | undefined,
  ): Promise<Attempt<MessageShape<O>>> {
    const metadata = await this.metadata(context);
    this.requireOpen();
    const call = this.#client.makeServerStreamRequest(
      pathOf(method),
      identity,
      decoder(method.output),
      request,
      metadata,
      withDeadline(timeoutMs),
    );
    return new StreamCall(this.#tracked(call));
  }

  duplex<I extends DescMessage, O extends DescMessage>(
    method: DescMethodBiDiStreaming<I, O>,
    metadata: Metadata,
  ): ClientDuplexStream<Buffer, MessageShape<O>> {
    this.requireOpen();
    const call = this.#client.makeBidiStreamRequest(
      pathOf(method),
      identity,
      decoder(method.output),
      metadata,
    );
    return this.#tracked(call);
  }

  #tracked<C extends ClientReadableStream<unknown> | ClientDuplexStream<Buffer, unknown>>(
    call: C,
  ): C {
    this.#open.add(call);
    call.on("status", () => this.#open.delete(call));
    // A call that is cancelled after its reader has left still emits its status as an error.
    call.on("error", () => undefined);
    return call;
  }
}

class StreamCall<T> implements Attempt<T> {
  readonly #call: ClientReadableStream<T>;
  headers: Metadata | undefined;

  constructor(call: ClientReadableStream<T>) {
    this.#call = call;
    call.on("metadata", (metadata: Metadata) => {
      this.headers = metadata;
    });
  }

  get responses(): AsyncIterable<T> {
    return this.#call as AsyncIterable<T>;
  }

  cancel(): void {
    this.#call.cancel();
  }
}

function pathOf(method: {
  readonly parent: { readonly typeName: string };
  readonly name: string;
}): string {
  return `/${method.parent.typeName}/${method.name}`;
}

function decoder<D extends DescMessage>(schema: D): (bytes: Buffer) => MessageShape<D> {
  return (bytes) => fromBinary(schema, bytes);
}

function identity(bytes: Buffer): Buffer {
  return bytes;
}

function withDeadline(timeoutMs: number | undefined): CallOptions {
  return timeoutMs === undefined ? {} : { deadline: Date.now() + timeoutMs };
}
