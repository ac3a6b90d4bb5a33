// What an application does all day, with nats.js, behind standard input and output; see lines.mjs.
// `node client_peer.mjs URL`
import { AckPolicy, jetstream, jetstreamManager } from "@nats-io/jetstream";
import { Kvm } from "@nats-io/kv";
import { connect, headers } from "@nats-io/transport-node";
import { answer } from "./lines.mjs";

const options = { servers: process.argv[2] };
const nc = await connect(options);
const js = jetstream(nc);
const jsm = await jetstreamManager(nc);

async function refusal(promise) {
  try {
    await promise;
  } catch (error) {
    return { name: (error.cause ?? error).name, code: error.code ?? null };
  }
  return null;
}

const operations = {
  info: async () => {
    const { version, headers, max_payload } = nc.info;
    return { version, headers, max_payload, rtt: await nc.rtt() };
  },

  async request({ subject, text }) {
    const sub = nc.subscribe(subject, {
      max: 1,
      callback: (_, msg) => msg.respond(msg.string().toUpperCase(), { headers: msg.headers }),
    });
    const lines = headers();
    lines.append("X-Kept", "one");
    lines.append("X-Kept", "two");
    const reply = await nc.request(subject, text, { headers: lines, timeout: 10_000 });
    await sub.closed;
    const nobody = await refusal(nc.request(subject, text, { timeout: 10_000 }));
    return { text: reply.string(), kept: reply.headers.values("X-Kept"), nobody };
  },

  async queue({ subject, members, count }) {
    const seen = Array(members).fill(0);
    let everybody = 0;
    const all = { callback: () => everybody++ };
    nc.subscribe(subject, all);
    for (let i = 0; i < members; i++) nc.subscribe(subject, { queue: "workers", callback: () => seen[i]++ });
    for (let i = 0; i < count; i++) nc.publish(subject, String(i));
    await nc.flush(); // the PONG comes after the messages
    return { seen, everybody };
  },

  async publish({ stream }) {
    await jsm.streams.add({ name: stream, subjects: [`${stream}.>`] });
    const first = await js.publish(`${stream}.a`, "1", { msgID: "m1" });
    const again = await js.publish(`${stream}.a`, "1", { msgID: "m1" });
    const last = await js.publish(`${stream}.b`, "2", { expect: { lastSequence: 1, streamName: stream } });
    const wrong = await refusal(js.publish(`${stream}.b`, "3", { expect: { lastSequence: 1 } }));
    const { state } = await jsm.streams.info(stream, { subjects_filter: ">" });
    const got = await jsm.streams.getMessage(stream, { last_by_subj: `${stream}.b` });
    return {
      acks: [first, again, last].map(({ stream, seq, duplicate }) => ({ stream, seq, duplicate })),
      wrong,
      subjects: state.subjects,
      last: got.string(),
    };
  },

  async pull({ stream, count }) {
    await jsm.consumers.add(stream, { durable_name: "worker", ack_policy: AckPolicy.Explicit });
    const consumer = await js.consumers.get(stream, "worker");
    const deliveries = [];
    const take = async (msg) => deliveries.push([msg.seq, msg.info.deliveryCount]);
    // The first goes back once: it comes again, as the second delivery of the same message.
    let refused = false;
    while (deliveries.length < count + 1) {
      for await (const msg of await consumer.fetch({ max_messages: count, expires: 5_000 })) {
        await take(msg);
        if (!refused) {
          refused = true;
          msg.nak();
        } else await msg.ackAck();
        if (deliveries.length === count + 1) break;
      }
    }
    const nothing = await consumer.next({ expires: 1_000 });
    const { num_pending, num_ack_pending, ack_floor } = await consumer.info();
    return { deliveries, nothing, num_pending, num_ack_pending, floor: ack_floor.stream_seq };
  },

  async ordered({ stream, count }) {
    const consumer = await js.consumers.get(stream); // without a name it is an ordered one
    const seqs = [];
    const messages = await consumer.consume({ max_messages: 10 }); // several requests
    for await (const msg of messages) {
      seqs.push(msg.seq);
      if (seqs.length === count) break;
    }
    await messages.close();
    return seqs;
  },

  async publish_many({ subject, count }) {
    for (let i = 0; i < count; i++) await js.publish(subject, String(i));
  },

  async key_value({ bucket }) {
    const kv = await new Kvm(js).create(bucket, { history: 5 });
    const watch = await kv.watch();
    const seen = [];
    const watching = (async () => {
      for await (const e of watch) {
        seen.push([e.key, e.operation, e.revision]);
        if (seen.length === 5) break;
      }
    })();
    const first = await kv.put("a", "1");
    const second = await kv.update("a", "2", first);
    const wrong = await refusal(kv.update("a", "3", first));
    await kv.create("b", "x");
    const exists = await refusal(kv.create("b", "y"));
    const value = (await kv.get("a")).string();
    const keys = [];
    for await (const key of await kv.keys()) keys.push(key);
    const history = [];
    for await (const e of await kv.history({ key: "a" })) history.push(e.string());
    await kv.delete("a");
    await kv.purge("b");
    await watching;
    const deleted = (await kv.get("a")).operation;
    const { values } = await kv.status();
    await kv.destroy();
    return { first, second, wrong, exists, value, keys: keys.sort(), history, seen, deleted, values };
  },

  async drain({ subject, count }) {
    const own = await connect(options);
    let taken = 0;
    own.subscribe(subject, { callback: () => taken++ });
    await own.flush();
    for (let i = 0; i < count; i++) nc.publish(subject, String(i));
    await nc.flush();
    await own.drain();
    return { taken, closed: own.isClosed() };
  },
};

await answer((operation, request) => operations[operation](request));
await nc.close();
