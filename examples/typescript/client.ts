import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { RouterService } from "./gen/outrider/v1/router_pb.js";

const transport = createGrpcTransport({ baseUrl: process.argv[2] ?? "http://127.0.0.1:50051" });
const router = createClient(RouterService, transport);

// Aborting the signal cancels the call, and the router frees everything the request held.
const stop = new AbortController();
process.on("SIGINT", () => stop.abort());

try {
  const answer = router.generate(
    {
      prompt: { case: "chat", value: { messages: [{ role: "user", content: "Why is the sky blue?" }] } },
      sampling: { temperature: 0.7, topP: 0.95, seed: 7n, maxTokens: 48 },
    },
    {
      signal: stop.signal,
      timeoutMs: 60_000,
      onTrailer: (trailers) => console.log(`first token after ${trailers.get("outrider-ttft-ms")} ms`),
    },
  );
  for await (const { event } of answer) {
    if (event.case === "delta") process.stdout.write(event.value.text);
    if (event.case === "summary") console.log(`\n${event.value.usage?.numGeneratedTokens} tokens`);
  }
} catch (error) {
  const { code, rawMessage } = ConnectError.from(error);
  if (code !== Code.Canceled) throw new Error(`${Code[code]}: ${rawMessage}`);
} finally {
  stop.abort(); // leaving the loop early does not end the call
}
