/** The behaviour of a stream that is rejected, cut, left or cancelled. Over real sockets. */

import assert from "node:assert/strict";
import { afterEach, test } from "node:test";
import { status as Codes } from "@grpc/grpc-js";
import {
  chat,
  Client,
  milliseconds,
  PenstockError,
  text,
  type ClientOptions,
} from "../src/index.js";
import { SYSTEM_TIMING } from "../src/timing.js";
import {
  acceptedAs,
  FakeService,
  finishedAt,
  rejection,
  resumedWith,
  tokensAt,
  type GenerateCall,
  type Handlers,
} from "./fake-service.js";

const REQUEST = { prompt: text("To be, or not") };
const RESUMABLE = { ...REQUEST, resumeTimeout: milliseconds(30_000) };
const endings: (() => void)[] = [];

afterEach(() => {
  for (const end of endings.splice(0).reverse()) end();
});

async function serve(handlers: Handlers): Promise<FakeService> {
  const service = await FakeService.start(handlers);
  endings.push(() => service.stop());
  return service;
}

function clientOf(service: FakeService, options: ClientOptions = {}): Client {
  const client = new Client(service.address, options);
  endings.push(() => client.close());
  return client;
}

/** Waits take no time, and are recorded. */
function patience(): { waitsMs: number[]; timing: NonNullable<ClientOptions["timing"]> } {
  const waitsMs: number[] = [];
  const sleep = async (delayMs: number): Promise<void> => {
    waitsMs.push(delayMs);
  };
  return { waitsMs, timing: { ...SYSTEM_TIMING, random: () => 0, sleep } };
}

function answer(call: GenerateCall, numTokens: number): void {
  call.write(acceptedAs("r1"));
  for (let sequence = 1; sequence <= numTokens; sequence++) call.write(tokensAt(sequence));
}

async function failure(promise: Promise<unknown>): Promise<PenstockError> {
  const error: unknown = await promise.then(
    () => undefined,
    (failed: unknown) => failed,
  );
  assert.ok(error instanceof PenstockError, `not a PenstockError but ${String(error)}`);
  return error;
}

test("a stream with a resumeTimeout is resumed after a lost connection", async () => {
  const points: unknown[] = [];
  const service = await serve({
    generate: (call) => answer(call, 3),
    resume: (call) => {
      const { requestId, nextSequence, receivedTokenCounts } = call.request;
      points.push({ requestId, nextSequence, receivedTokenCounts });
      call.write(resumedWith(tokensAt(4)));
      call.write(resumedWith(finishedAt(5)));
      call.end();
    },
  });
  let received = "";
  for await (const { event } of clientOf(service).generate(RESUMABLE)) {
    if (event.case === "tokens") received += event.value.text;
    if (received === "1 2 3 ") service.cut();
  }
  assert.equal(received, "1 2 3 4 ");
  assert.deepEqual(points, [{ requestId: "r1", nextSequence: 4n, receivedTokenCounts: [3] }]);
});

test("a finish whose status was lost is read again", async () => {
  const points: bigint[] = [];
  const service = await serve({
    generate: (call) => {
      answer(call, 1);
      call.write(finishedAt(2));
      call.emit("error", rejection(Codes.UNAVAILABLE, "DRAINING"));
    },
    resume: (call) => {
      points.push(call.request.nextSequence);
      call.write(resumedWith(finishedAt(2)));
      call.end();
    },
  });
  const stream = clientOf(service).generate(RESUMABLE);
  const events: unknown[] = [];
  for await (const { event } of stream) events.push(event.case);
  assert.deepEqual(events, ["accepted", "tokens", "finished"]);
  assert.deepEqual(points, [2n]);
  assert.equal(stream.point.nextSequence, 3n);
});

test("without a resume timeout a lost connection is reported", async () => {
  const service = await serve({ generate: (call) => answer(call, 3) });
  const stream = clientOf(service).generate(REQUEST);
  for (let count = 0; count < 4; count++) await stream.next();
  service.cut();
  const error = await failure(stream.next());
  assert.equal(error.requestId, "r1");
  assert.ok([Codes.UNAVAILABLE, Codes.INTERNAL].includes(error.code), error.message);
});

test("a rejection for lack of capacity is retried after its retry delay", async () => {
  let numCalls = 0;
  const service = await serve({
    generate: (call) => {
      numCalls += 1;
      if (numCalls < 3) call.emit("error", rejection(Codes.RESOURCE_EXHAUSTED, "QUEUE_FULL", 70));
      else {
        answer(call, 1);
        call.write(finishedAt(2));
        call.end();
      }
    },
  });
  const { waitsMs, timing } = patience();
  let received = "";
  for await (const piece of clientOf(service, { timing }).generateText(REQUEST)) received += piece;
  assert.equal(received, "1 ");
  assert.deepEqual(waitsMs, [70, 70]);
});

test("retries end with the policy's attempts, and the error has every detail", async () => {
  let numCalls = 0;
  const service = await serve({
    generate: (call) => {
      numCalls += 1;
      call.emit("error", rejection(Codes.RESOURCE_EXHAUSTED, "QUEUE_FULL", 70));
    },
  });
  const { timing } = patience();
  const client = clientOf(service, { timing, retry: { maxAttempts: 3 } });
  const error = await failure(client.generate(REQUEST).next());
  assert.equal(numCalls, 3);
  assert.equal(error.codeName, "RESOURCE_EXHAUSTED");
  assert.equal(error.reason, "QUEUE_FULL");
  assert.equal(error.retryAfterMs, 70);
  assert.deepEqual({ ...error.info }, { key: "value" });
});

test("nothing is tried again once output was delivered", async () => {
  let numCalls = 0;
  const service = await serve({
    generate: (call) => {
      numCalls += 1;
      answer(call, 1);
      call.emit("error", rejection(Codes.UNAVAILABLE, "ENGINE_DOWN", 10));
    },
  });
  const stream = clientOf(service, { timing: patience().timing }).generate(REQUEST);
  await stream.next();
  await stream.next();
  assert.equal((await failure(stream.next())).reason, "ENGINE_DOWN");
  assert.equal(numCalls, 1);
});

test("leaving the loop cancels the call, and a request that outlives it by its id", async () => {
  const cancelled: string[] = [];
  let reportEnd = (): void => undefined;
  const callEnded = new Promise<void>((resolve) => {
    reportEnd = resolve;
  });
  const service = await serve({
    generate: (call) => {
      call.on("cancelled", reportEnd);
      answer(call, 1);
    },
    cancel: ({ requestId }) => {
      cancelled.push(requestId);
      return {};
    },
  });
  for await (const { event } of clientOf(service).generate(RESUMABLE)) {
    if (event.case === "tokens") break;
  }
  await callEnded;
  assert.deepEqual(cancelled, ["r1"]);
});

test("a closed client leaves such a request to be resumed", async () => {
  const cancelled: string[] = [];
  const service = await serve({
    generate: (call) => answer(call, 1),
    cancel: ({ requestId }) => {
      cancelled.push(requestId);
      return {};
    },
  });
  const client = clientOf(service);
  const stream = client.generate(RESUMABLE);
  await stream.next();
  await stream.next();
  client.close();
  assert.equal((await failure(stream.next())).code, Codes.CANCELLED);
  assert.deepEqual(stream.point, { requestId: "r1", nextSequence: 2n, receivedTokenCounts: [1] });
  assert.deepEqual(cancelled, []);
});

test("an abort ends waiting readers with CANCELLED and its reason", async () => {
  const service = await serve({ generate: (call) => answer(call, 1) });
  const leaving = new AbortController();
  const stream = clientOf(service).generate(REQUEST, { signal: leaving.signal });
  await stream.next();
  await stream.next();
  const waiting = failure(stream.next());
  leaving.abort("enough");
  const error = await waiting;
  assert.equal(error.code, Codes.CANCELLED);
  assert.equal(error.cause, "enough");
});

test("a gap and a missing end are broken streams", async () => {
  const service = await serve({
    generate: (call) => {
      call.write(acceptedAs("r1"));
      if (call.metadata.get("kind")[0] === "gap") call.write(tokensAt(2));
      call.end();
    },
  });
  const client = clientOf(service);
  for (const kind of ["gap", "end"]) {
    const stream = client.generate(REQUEST, { metadata: { kind } });
    await stream.next();
    assert.equal((await failure(stream.next())).reason, "STREAM_BROKEN", kind);
  }
});

test("a value that does not fit its field is rejected before anything is sent", async () => {
  const service = await serve({});
  const client = clientOf(service);
  const request = { ...REQUEST, sampling: { topK: -1 } };
  assert.throws(() => client.generate(request), { name: "TypeError", message: /top_k/ });
  const half = { role: "user", content: "\ud83d" };
  const withChat = { prompt: chat([{ role: "user", content: "🚀" }, half]) };
  const message = "chat_prompt.messages[1].parts[0].text: has an unpaired surrogate";
  assert.throws(() => client.generate(withChat), { name: "TypeError", message });
  const stopping = { stopStrings: ["a", "\ude80"] };
  assert.throws(() => client.generate({ ...REQUEST, stopping }), /stopping.stop_strings\[1\]/);
});

test("trace context and token travel as metadata; a call's own trace counts", async () => {
  const seen: unknown[] = [];
  const service = await serve({
    generate: (call) => {
      seen.push(
        ["authorization", "traceparent", "tracestate"].map((key) => call.metadata.get(key)[0]),
      );
      answer(call, 0);
      call.write(finishedAt(1));
      call.end();
    },
  });
  const client = clientOf(service, {
    token: async () => "secret",
    trace: () => ({ traceparent: "of-the-client", tracestate: "a=b" }),
  });
  const read = async (stream: AsyncIterable<unknown>): Promise<void> => {
    for await (const _ of stream);
  };
  await read(client.generate(REQUEST));
  await read(client.generate(REQUEST, { trace: { traceparent: "of-the-call" } }));
  await read(client.generate(REQUEST, { metadata: { traceparent: "of-the-metadata" } }));
  assert.deepEqual(seen, [
    ["Bearer secret", "of-the-client", "a=b"],
    ["Bearer secret", "of-the-call", undefined],
    ["Bearer secret", "of-the-metadata", undefined],
  ]);
});

test("headers that cannot be sent are rejected before anything is sent, without their values", async () => {
  const service = await serve({});
  const client = clientOf(service);
  const trace = { traceparent: "secret\n" };
  const message = /^trace\.traceparent: cannot be a header(?!.*secret)/;
  assert.throws(() => client.generate(REQUEST, { trace }), { name: "TypeError", message });
  assert.throws(() => client.generateText(REQUEST, { trace }), { name: "TypeError", message });
  await assert.rejects(client.generateOnce(REQUEST, { trace }), { name: "TypeError", message });
  assert.throws(
    () => client.generate(REQUEST, { trace: { traceparent: "x", tracestate: "é" } }),
    /^TypeError: trace\.tracestate: /,
  );
  for (const metadata of [{ "a b": "x" }, { good: "x", note: "secret\r" }]) {
    const expected = /^TypeError: metadata\.(a b|note): (?!.*secret)/;
    assert.throws(() => client.generate(REQUEST, { metadata }), expected);
    assert.throws(() => clientOf(service, { metadata }), expected);
  }
});

test("so is the trace that the client is asked for", async () => {
  const service = await serve({});
  const client = clientOf(service, { trace: () => ({ traceparent: "x\n" }) });
  const message = /^trace\.traceparent: /;
  for (const stream of [client.generate(REQUEST), client.multiplex().generate(REQUEST)]) {
    await assert.rejects(stream.next(), { name: "TypeError", message });
  }
});

test("a stream of text rejects several outputs before anything is sent", async () => {
  let numCalls = 0;
  const service = await serve({
    generate: (call) => {
      numCalls += 1;
      answer(call, 1);
      call.write(finishedAt(2));
      call.end();
    },
  });
  const client = clientOf(service);
  assert.throws(
    () => client.generateText({ ...REQUEST, sampling: { numOutputs: 2 } }),
    /^RangeError: sampling\.num_outputs: /,
  );
  assert.equal(numCalls, 0);
  let received = "";
  for await (const piece of client.generateText({ ...REQUEST, sampling: { numOutputs: 1 } })) {
    received += piece;
  }
  assert.equal(received, "1 ");
});
