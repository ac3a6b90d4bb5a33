// The key-value client of nats.js behind standard input and output, see lines.mjs. Values are base64.
// `node kv_peer.mjs URL`; kv_peer.go speaks the same.
import { Kvm } from "@nats-io/kv";
import { connect } from "@nats-io/transport-node";
import { answer } from "./lines.mjs";

const nc = await connect({ servers: process.argv[2] });
const kvm = new Kvm(nc);
const buckets = new Map();
let watcher;

const bytes = (value) => Buffer.from(value, "base64");
const entry = (e) =>
  e && {
    key: e.key,
    value: Buffer.from(e.value).toString("base64"),
    revision: e.revision,
    created: e.created.getTime() / 1000,
    operation: e.operation,
  };

async function collect(iterator, map) {
  const all = [];
  for await (const item of iterator) all.push(map(item));
  return all;
}

const operations = {
  async make(_, { bucket, history, marker_ttl }) {
    const options = { history };
    if (marker_ttl) options.markerTTL = marker_ttl * 1000;
    buckets.set(bucket, await kvm.create(bucket, options));
  },
  async open(_, { bucket }) {
    // Through the stream's information, as an application would: allow_direct is what the bucket has.
    buckets.set(bucket, await kvm.create(bucket));
  },
  put: (kv, { key, value }) => kv.put(key, bytes(value)),
  create: (kv, { key, value, ttl }) => kv.create(key, bytes(value), ttl ? `${ttl}s` : undefined),
  update: (kv, { key, value, last }) => kv.update(key, bytes(value), last),
  delete: (kv, { key, last }) => kv.delete(key, last ? { previousSeq: last } : {}),
  purge: (kv, { key, ttl }) => kv.purge(key, ttl ? { ttl: `${ttl}s` } : {}),
  get: async (kv, { key, revision }) => entry(await kv.get(key, revision ? { revision } : undefined)),
  history: async (kv, { key }) => collect(await kv.history({ key }), entry),
  keys: async (kv, { filter }) => collect(await kv.keys(filter), (key) => key),
  purge_deletes: async (kv) => (await kv.purgeDeletes(0)).purged,
  async watch(kv, { filter }) {
    watcher = (await kv.watch({ key: filter }))[Symbol.asyncIterator]();
  },
  next: async () => entry((await watcher.next()).value),
  async write_many(kv, { keys, count }) {
    for (let i = 0; i < count; i++) {
      const key = keys[Math.floor(Math.random() * keys.length)];
      const dice = Math.random();
      if (dice < 0.7) await kv.put(key, new TextEncoder().encode(`theirs ${i}`));
      else if (dice < 0.85) await kv.delete(key);
      else await kv.purge(key);
    }
  },
};

await answer((operation, request) => operations[operation](buckets.get(request.bucket), request));
await nc.close();
