/** The scenarios about answers: streams, prompts, text and metadata. */

import { randomBytes } from "node:crypto";
import { chat as chatPrompt, text, tokenIds } from "../src/index.js";
import { CALL_MS, greedy, Heard, newId, require, type Talk } from "./talk.js";

const NUM_LARGE_TOKENS = 100_000;
const TEXT = "naïve 日本語 🚀";
const CALL = { deadlineMs: CALL_MS };

export async function streamInOrder(talk: Talk): Promise<void> {
  const heard = new Heard(talk.client().generate(greedy(12), CALL));
  const finished = await heard.untilEnd();
  const accepted = await heard.untilAccepted();
  require(accepted.requestId !== "" && accepted.model !== "", "accepted without names");
  require(heard.numTokens === 12, `${heard.numTokens} tokens, not 12`);
  const numTold = finished.usage?.numCompletionTokens;
  require(numTold === 12, `usage tells ${numTold} tokens, not 12`);
  require(heard.finishReason === "LENGTH", `the reason is ${heard.finishReason}, not LENGTH`);
}

export async function onceEqualsStream(talk: Talk): Promise<void> {
  const client = talk.client();
  const heard = new Heard(client.generate(greedy(32), CALL));
  await heard.untilEnd();
  const once = await client.generateOnce(greedy(32), CALL);
  const whole = once.outputs[0]?.text ?? "";
  require(whole === heard.text, `${JSON.stringify(whole)} is not ${JSON.stringify(heard.text)}`);
  require(whole !== "", "there is no text");
  let pieces = "";
  for await (const piece of client.generateText(greedy(32), CALL)) pieces += piece;
  require(pieces === whole, "generateText has another text");
}

export async function tokenPrompt(talk: Talk): Promise<void> {
  const client = talk.client();
  const ids = Array.from({ length: 20 }, (_, index) => 5 + index);
  const answers: number[][] = [];
  for (let turn = 0; turn < 2; turn++) {
    const request = { ...greedy(12, tokenIds(ids)), output: { returnTokenIds: true } };
    const heard = new Heard(client.generate(request, CALL));
    const { usage } = await heard.untilEnd();
    require(usage?.numPromptTokens === 20, `usage tells ${usage?.numPromptTokens} prompt tokens`);
    answers.push(heard.tokenIds);
  }
  const [first = [], second = []] = answers;
  require(first.length === 12, `${first.length} token ids, not 12`);
  require(first.join() === second.join(), `[${first}] the first time, [${second}] the second`);
}

export async function chat(talk: Talk): Promise<void> {
  const turns = [
    { role: "system", content: "You answer in one sentence." },
    { role: "user", content: "Where is the Globe?" },
  ];
  const heard = new Heard(talk.client().generate(greedy(24, chatPrompt(turns)), CALL));
  await heard.untilEnd();
  require(heard.text !== "", "there is no text");
  require(heard.numTokens === 24, `${heard.numTokens} tokens, not 24`);
}

export async function utf8AcrossChunks(talk: Talk): Promise<void> {
  const client = talk.client();
  const request = greedy(200, text(TEXT));
  const once = await client.generateOnce({ ...request, output: { echo: true } }, CALL);
  const heard = new Heard(
    client.generate({ ...request, output: { echo: true, minChunkTokens: 1 } }, CALL),
  );
  await heard.untilEnd();
  for (const echoed of [once.prompt?.text, heard.promptText]) {
    require(echoed === TEXT, `the prompt came back as ${JSON.stringify(echoed)}`);
  }
  const whole = once.outputs[0]?.text ?? "";
  require(heard.text === whole, `${JSON.stringify(heard.text)} is not ${JSON.stringify(whole)}`);
  require(/[^\x00-\x7f]/.test(whole), "the text has no character beyond ASCII");
  for (const { text: chunk } of heard.chunks) {
    // A lone surrogate cannot be encoded: it throws.
    encodeURIComponent(chunk);
  }
}

export async function largePrompt(talk: Talk): Promise<void> {
  const ids = Array.from({ length: NUM_LARGE_TOKENS }, (_, index) => 5 + (index % 1000));
  const heard = new Heard(talk.client().generate(greedy(4, tokenIds(ids)), CALL));
  const { usage } = await heard.untilEnd();
  const numTold = usage?.numPromptTokens;
  require(numTold === NUM_LARGE_TOKENS, `usage tells ${numTold} prompt tokens`);
  require(heard.numTokens === 4, `${heard.numTokens} tokens, not 4`);
}

export async function metadata(talk: Talk): Promise<void> {
  const traceId = randomBytes(16).toString("hex");
  const requestId = newId();
  const trace = { traceparent: `00-${traceId}-${randomBytes(8).toString("hex")}-01` };
  const heard = new Heard(talk.client().generate({ ...greedy(4), requestId }, { ...CALL, trace }));
  const accepted = await heard.untilAccepted();
  await heard.untilEnd();
  require(accepted.requestId === requestId, `accepted as ${accepted.requestId}`);
  require(accepted.traceId === traceId, `the trace id is ${accepted.traceId}, not ${traceId}`);
}
