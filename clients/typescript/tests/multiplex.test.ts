/** Requests that share a call: credit, loss, and the change to a new call. Over real sockets. */

import assert from "node:assert/strict";
import { afterEach, test } from "node:test";
import { status as Codes } from "@grpc/grpc-js";
import { create } from "@bufbuild/protobuf";
import {
  Client,
  MultiplexResponseSchema,
  NO_RETRY,
  PenstockError,
  text,
  type GenerateResponse,
} from "../src/index.js";
import {
  acceptedAs,
  FakeService,
  finishedAt,
  tokensAt,
  type MultiplexCall,
} from "./fake-service.js";

const REQUEST = { prompt: text("To be, or not") };
const endings: (() => void)[] = [];

afterEach(() => {
  for (const end of endings.splice(0).reverse()) end();
});

async function connected(multiplex: (call: MultiplexCall) => void) {
  const service = await FakeService.start({ multiplex });
  const client = new Client(service.address, { retry: NO_RETRY });
  endings.push(
    () => service.stop(),
    () => client.close(),
  );
  return { service, client };
}

function send(call: MultiplexCall, key: bigint, ...responses: GenerateResponse[]): void {
  const events = responses.map((value) => ({ key, outcome: { case: "response", value } }) as const);
  call.write(create(MultiplexResponseSchema, { events }));
}

test("credit is topped up with what was taken, half a window at a time", async () => {
  const credits: [bigint, number][] = [];
  let numCreditTokens: number | undefined;
  const { client } = await connected((call) => {
    let sequence = 1;
    call.on("data", ({ command }) => {
      if (command.case === "submit") {
        ({ numCreditTokens } = command.value);
        send(call, command.value.key, acceptedAs("r1"));
        for (; sequence <= 4; sequence++) send(call, command.value.key, tokensAt(sequence));
      } else if (command.case === "credit") {
        credits.push([command.value.key, command.value.numCreditTokens]);
        if (credits.length === 2) send(call, command.value.key, finishedAt(5));
      }
    });
  });
  const session = client.multiplex({ windowTokens: 4 });
  for await (const _ of session.generate(REQUEST));
  assert.equal(numCreditTokens, 4);
  assert.deepEqual(credits, [
    [1n, 2],
    [1n, 2],
  ]);
});

test("a lost call fails each of its requests, and the next goes to a new one", async () => {
  let numCalls = 0;
  const { service, client } = await connected((call) => {
    numCalls += 1;
    const isFirst = numCalls === 1;
    call.on("error", () => undefined);
    call.on("data", ({ command }) => {
      if (command.case !== "submit") return;
      send(call, command.value.key, acceptedAs(`r${command.value.key}`));
      if (!isFirst) send(call, command.value.key, finishedAt(1));
    });
  });
  const session = client.multiplex();
  const streams = [session.generate(REQUEST), session.generate(REQUEST)];
  for (const stream of streams) await stream.next();
  service.cut();
  for (const [index, stream] of streams.entries()) {
    await assert.rejects(stream.next(), (error) => {
      assert.ok(error instanceof PenstockError);
      assert.equal(error.requestId, `r${index + 1}`);
      return true;
    });
  }
  const patient = session.generate(REQUEST, { retry: { maxAttempts: 20, initialBackoffMs: 50 } });
  const cases: unknown[] = [];
  for await (const { event } of patient) cases.push(event.case);
  assert.deepEqual(cases, ["accepted", "finished"]);
  assert.equal(numCalls, 2);
});

test("leaving a request cancels it by its key and leaves the others alone", async () => {
  const { client } = await connected((call) => {
    call.on("data", ({ command }) => {
      if (command.case === "submit") send(call, command.value.key, acceptedAs("r"), tokensAt(1));
      // Late events of the abandoned request are dropped; the other request continues.
      if (command.case === "cancel") send(call, command.value.key, finishedAt(2));
      if (command.case === "cancel") send(call, 2n, tokensAt(2), finishedAt(3));
    });
  });
  const session = client.multiplex();
  const [left, kept] = [session.generate(REQUEST), session.generate(REQUEST)];
  await left.next();
  await kept.next();
  await left.return();
  let numMessages = 1;
  for await (const _ of kept) numMessages += 1;
  assert.equal(numMessages, 4);
});

test("a request that is too large fails alone and is not sent", async () => {
  let numCommands = 0;
  const { client } = await connected((call) => call.on("data", () => (numCommands += 1)));
  const session = client.multiplex({ maxRequestBytes: 100 });
  const stream = session.generate({ prompt: text("x".repeat(200)) });
  await assert.rejects(stream.next(), { code: Codes.RESOURCE_EXHAUSTED });
  assert.equal(numCommands, 0);
});

test("a request's deadline travels as its total deadline", async () => {
  let totalTimeout: { seconds: bigint } | undefined;
  const { client } = await connected((call) => {
    call.on("data", ({ command }) => {
      if (command.case !== "submit") return;
      totalTimeout = command.value.generation?.scheduling?.totalTimeout;
      send(call, command.value.key, acceptedAs("r"), finishedAt(1));
    });
  });
  for await (const _ of client.multiplex().generate(REQUEST, { deadlineMs: 3_600_900 }));
  assert.equal(totalTimeout?.seconds, 3600n);
});

test("what cannot be sent fails alone, before anything is sent", async () => {
  let numSubmitted = 0;
  const { client } = await connected((call) => {
    call.on("data", ({ command }) => {
      if (command.case !== "submit") return;
      numSubmitted += 1;
      send(call, command.value.key, acceptedAs("r"));
      // The second request to arrive ends both.
      if (numSubmitted === 2) for (const key of [1n, 2n]) send(call, key, finishedAt(1));
    });
  });
  const session = client.multiplex();
  const neighbour = session.generate(REQUEST);
  await neighbour.next();
  assert.throws(() => session.generate({ prompt: text("x\ud83d") }), {
    name: "TypeError",
    message: /^text_prompt\.text: /,
  });
  assert.throws(() => session.generate(REQUEST, { trace: { traceparent: "x\n" } }), {
    name: "TypeError",
    message: /^trace\.traceparent: /,
  });
  for (const stream of [session.generate(REQUEST), neighbour]) for await (const _ of stream);
  assert.equal(numSubmitted, 2);
});
