// A request and its answer are a line of JSON each, on standard input and output; the end of the input is the end.
import { createInterface } from "node:readline";

export async function answer(perform) {
  for await (const line of createInterface({ input: process.stdin })) {
    const { operation, ...request } = JSON.parse(line);
    let answer;
    try {
      answer = { result: (await perform(operation, request)) ?? null };
    } catch (error) {
      answer = { error: `${error.name}: ${error.message}`, code: error.code ?? null };
    }
    process.stdout.write(JSON.stringify(answer) + "\n");
  }
}
