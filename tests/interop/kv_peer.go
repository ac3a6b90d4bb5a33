// The key-value client of nats.go behind standard input and output, as kv_peer.mjs is that of nats.js.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand"
	"os"
	"time"

	"github.com/nats-io/nats.go"
)

type request struct {
	Operation, Bucket, Key, Filter string
	Keys                           []string
	Value                          []byte
	Last, Revision                 uint64
	History, Count                 int
}

type entry struct {
	Key       string  `json:"key"`
	Value     []byte  `json:"value"`
	Revision  uint64  `json:"revision"`
	Created   float64 `json:"created"`
	Operation string  `json:"operation"`
}

var operations = map[nats.KeyValueOp]string{nats.KeyValuePut: "PUT", nats.KeyValueDelete: "DEL", nats.KeyValuePurge: "PURGE"}

func asEntry(e nats.KeyValueEntry) entry {
	value := e.Value()
	if value == nil {
		value = []byte{}
	}
	return entry{e.Key(), value, e.Revision(), float64(e.Created().UnixNano()) / 1e9, operations[e.Operation()]}
}

func writeMany(kv nats.KeyValue, keys []string, count int) error {
	for i := 0; i < count; i++ {
		var err error
		key := keys[rand.Intn(len(keys))]
		switch dice := rand.Intn(100); {
		case dice < 70:
			_, err = kv.Put(key, []byte(fmt.Sprintf("theirs %d", i)))
		case dice < 85:
			err = kv.Delete(key)
		default:
			err = kv.Purge(key)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

type peer struct {
	js      nats.JetStreamContext
	buckets map[string]nats.KeyValue
	watcher nats.KeyWatcher
}

func (p *peer) do(r request) (any, error) {
	kv := p.buckets[r.Bucket]
	var err error
	switch r.Operation {
	case "make":
		p.buckets[r.Bucket], err = p.js.CreateKeyValue(&nats.KeyValueConfig{Bucket: r.Bucket, History: uint8(r.History)})
	case "open":
		p.buckets[r.Bucket], err = p.js.KeyValue(r.Bucket)
	case "put":
		return kv.Put(r.Key, r.Value)
	case "create":
		return kv.Create(r.Key, r.Value)
	case "update":
		return kv.Update(r.Key, r.Value, r.Last)
	case "delete":
		if r.Last > 0 {
			return nil, kv.Delete(r.Key, nats.LastRevision(r.Last))
		}
		err = kv.Delete(r.Key)
	case "purge":
		err = kv.Purge(r.Key)
	case "get":
		var e nats.KeyValueEntry
		if r.Revision > 0 {
			e, err = kv.GetRevision(r.Key, r.Revision)
		} else {
			e, err = kv.Get(r.Key)
		}
		if errors.Is(err, nats.ErrKeyNotFound) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		return asEntry(e), nil
	case "history":
		all, err := kv.History(r.Key)
		entries := []entry{}
		for _, e := range all {
			entries = append(entries, asEntry(e))
		}
		return entries, err
	case "keys":
		watcher, err := kv.Watch(r.Filter, nats.IgnoreDeletes(), nats.MetaOnly())
		if err != nil {
			return nil, err
		}
		defer watcher.Stop()
		keys := []string{}
		for e := range watcher.Updates() {
			if e == nil {
				break
			}
			keys = append(keys, e.Key())
		}
		return keys, nil
	case "purge_deletes":
		err = kv.PurgeDeletes(nats.DeleteMarkersOlderThan(-1))
	case "watch":
		p.watcher, err = kv.Watch(r.Filter)
	case "next":
		for {
			select {
			case e := <-p.watcher.Updates():
				if e != nil { // nil: all that was there has come
					return asEntry(e), nil
				}
			case <-time.After(30 * time.Second):
				return nil, errors.New("nothing came")
			}
		}
	case "write_many":
		err = writeMany(kv, r.Keys, r.Count)
	default:
		err = fmt.Errorf("no operation %q", r.Operation)
	}
	return nil, err
}

func must(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	nc, err := nats.Connect(os.Args[1])
	must(err)
	defer nc.Close()
	js, err := nc.JetStream()
	must(err)
	p := peer{js: js, buckets: map[string]nats.KeyValue{}}
	lines := bufio.NewScanner(os.Stdin)
	answers := json.NewEncoder(os.Stdout)
	for lines.Scan() {
		var r request
		must(json.Unmarshal(lines.Bytes(), &r))
		result, err := p.do(r)
		answer := map[string]any{"result": result}
		if err != nil {
			answer = map[string]any{"error": err.Error(), "code": nil}
			var refusal *nats.APIError
			if errors.As(err, &refusal) {
				answer["code"] = refusal.ErrorCode
			}
		}
		must(answers.Encode(answer))
	}
}
