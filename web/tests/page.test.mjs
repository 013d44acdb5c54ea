// The page in a real Chromium. Run by `make test-web`, which builds it and the native program first.

import { after, before, test } from "node:test";
import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync, existsSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import path from "node:path";
import { birkhoff, launch, nativeRun, open, out, serveDist } from "./browser.mjs";

let server, browser, folder;

before(async () => {
  server = await serveDist();
  browser = await launch();
  folder = mkdtempSync(path.join(tmpdir(), "birkhoff-web-"));
});

after(async () => {
  await browser?.close();
  server?.close();
  if (folder) rmSync(folder, { recursive: true, force: true });
});

const shot = (page, name) => page.screenshot({ path: path.join(out, `${name}.png`) });
const state = async (page) => JSON.parse(await page.evaluate(() => window.birkhoff.state()));

// Points at a widget by the name that the program gives it.
async function place(page, name) {
  const found = await page.waitForFunction(
    (name) => JSON.parse(window.birkhoff.places())[name] ?? null, name, { timeout: 10_000 });
  const [x, y, w, h] = await found.jsonValue();
  return { x: x + w / 2, y: y + h / 2, left: x, top: y, width: w, height: h };
}

async function click(page, name) {
  const { x, y } = await place(page, name);
  await page.mouse.move(x, y);
  await page.waitForTimeout(80);
  await page.mouse.click(x, y);
  await page.waitForTimeout(150);
}

async function until(page, what, ok, timeout = 120_000) {
  const end = Date.now() + timeout;
  for (;;) {
    const s = await state(page);
    if (ok(s)) return s;
    assert.ok(Date.now() < end, `${what}: ${JSON.stringify(s)}`);
    await page.waitForTimeout(200);
  }
}

// 20 steps: what the native run and the page are compared on.
const twenty = (mode) => ({
  set: [
    "train.batch=64", "train.eval_batch=256", "train.log_every=1", "train.eval_every=0", "train.patience=0",
    // long embedding rows keep steps small beside what they change: at the default rates roundings of 1e-7 grow
    // fivefold a step on any device (tests/training.rs)
    "train.lr=1e-3", "train.embedding_lr=0.02", "train.embedding_init=1.0", "train.diagnose_every=5",
    "train.seed=3", "data.min_count=2",
    "model.layers=3", `model.residual.mode=${mode}`,
  ],
  data: { from: "planted", seed: 5, train: 1280, valid: 256 },
});
const native = {};
const nativeTwenty = (mode) => (native[mode] ??= nativeRun(mkdtempSync(path.join(folder, mode)), twenty(mode)));
const losses = (events) => events.filter((e) => e.type === "step").map((e) => e.loss);
const diagnoses = (events) => events.filter((e) => e.type === "diagnose");

const trainIn = (page, setup) =>
  page.evaluate(async (s) => JSON.parse(await window.birkhoff.train(JSON.stringify(s))), setup);

function close(a, b, tolerance, what) {
  assert.equal(a.length, b.length, what);
  a.forEach((x, i) => {
    const gap = Math.abs(x - b[i]) / Math.max(1e-9, Math.abs(b[i]));
    assert.ok(gap < tolerance, `${what} ${i}: ${x} and ${b[i]} differ by ${gap}`);
  });
}

test("every shader compiles in Chrome's compiler", { timeout: 1_200_000 }, async () => {
  const kernels = JSON.parse(readFileSync(process.env.BIRKHOFF_KERNELS, "utf8"));
  assert.ok(kernels.length > 100, `${kernels.length} kernels`);
  const { page, problems } = await open(browser, server.url);
  const bad = await page.evaluate(async (kernels) => {
    const adapter = await navigator.gpu.requestAdapter();
    const device = await adapter.requestDevice();
    const bad = [];
    const one = async ({ label, entry, source, constants }) => {
      const module = device.createShaderModule({ code: source });
      const messages = (await module.getCompilationInfo()).messages.filter((m) => m.type !== "info");
      for (const m of messages) bad.push(`${label}: ${m.type} ${m.lineNum}:${m.linePos} ${m.message}`);
      try {
        await device.createComputePipelineAsync({ layout: "auto", compute: { module, entryPoint: entry, constants } });
      } catch (e) {
        bad.push(`${label}: ${e.message}`);
      }
    };
    // some at a time, so that every core has one to compile
    const rest = [...kernels];
    const worker = async () => {
      for (let k = rest.pop(); k; k = rest.pop()) await one(k);
    };
    await Promise.all(Array.from({ length: 6 }, worker));
    return bad;
  }, kernels);
  console.log(`${kernels.length} kernels compiled by Chrome`);
  assert.deepEqual(bad, []);
  assert.deepEqual(problems, []);
  await page.close();
});

for (const device of ["cpu", "webgpu"]) {
  for (const mode of ["mhc", "hc", "shortcut"]) {
    test(`20 steps of ${mode} on ${device} in the page are those of the native program`, { timeout: 280_000 }, async () => {
      const want = nativeTwenty(mode);
      const { page, problems } = await open(browser, server.url);
      const got = await trainIn(page, { ...twenty(mode), device });
      assert.match(got.device, device === "cpu" ? /CPU/ : /WebGPU/);
      assert.equal(losses(got.events).length, 20);
      close(losses(got.events), losses(want), 1e-3, "loss");
      const [a, b] = [diagnoses(got.events), diagnoses(want)];
      assert.ok(a.length >= 5, `${a.length} diagnoses`);
      assert.deepEqual(a.map((d) => d.step), b.map((d) => d.step));
      for (const [x, y] of a.map((d, i) => [d, b[i]])) {
        for (const curve of ["composite_forward", "composite_backward"]) close(x[curve], y[curve], 1e-3, `${curve} at step ${x.step}`);
        for (const gain of ["forward_gain", "backward_gain"])
          close(x.layers.map((l) => l[gain]), y.layers.map((l) => l[gain]), 1e-3, `${gain} at step ${x.step}`);
      }
      assert.deepEqual(problems, []);
      console.log(`${device} ${mode}: ${got.step_ms.toFixed(1)} ms a step, ${Math.round(got.summary.rows_per_s)} rows/s on ${got.device}`);
      await page.close();
    });
  }
}

test("a run started by hand trains, can be stopped, and the page answers meanwhile", { timeout: 280_000 }, async () => {
  const { page, problems } = await open(browser, server.url);
  await shot(page, "welcome");
  await click(page, "device.CPU");
  await page.evaluate(() => {
    window.gaps = [];
    let last = performance.now();
    const tick = (now) => {
      window.gaps.push(now - last);
      last = now;
      requestAnimationFrame(tick);
    };
    requestAnimationFrame(tick);
  });
  await click(page, "train.go");
  await until(page, "steps", (s) => s.train?.phase === "training" && s.train.step > 25);
  await page.waitForTimeout(600);
  await shot(page, "training");
  await page.keyboard.press("3");
  await page.waitForTimeout(900);
  await shot(page, "training-gains");
  const gaps = await page.evaluate(() => window.gaps.sort((a, b) => a - b));
  const longest = gaps.at(-1);
  console.log(`frames while training: median ${gaps[gaps.length >> 1].toFixed(0)} ms, longest ${longest.toFixed(0)} ms`);
  assert.ok(longest < 2500, `the page stood still for ${longest} ms`);
  await click(page, "train.stop");
  const s = await until(page, "the end", (s) => s.train.phase !== "training");
  assert.equal(s.train.phase, "finished", s.train.error);
  assert.ok(s.train.step < 400, `it stopped at ${s.train.step}`);
  await page.waitForTimeout(600);
  await shot(page, "stopped");
  assert.deepEqual(problems, []);
  await page.close();
});

test("a plot of the page is downloaded as numbers and as a picture", { timeout: 280_000 }, async () => {
  const { page, problems } = await open(browser, server.url);
  await click(page, "device.CPU");
  const { x, y } = await place(page, "train.steps");
  await page.mouse.dblclick(x, y);
  await page.keyboard.press("Control+A");
  await page.keyboard.type("20");
  await page.keyboard.press("Enter");
  await click(page, "train.go");
  const s = await until(page, "the end", (s) => s.train && !["preparing", "training"].includes(s.train.phase));
  assert.deepEqual([s.train.phase, s.train.steps], ["finished", 20], s.train.error);
  await page.waitForTimeout(800);
  const save = async (name) => {
    let d;
    // on a busy machine a click can fall between two frames
    for (let k = 0; k < 4 && !d; k++) {
      const download = page.waitForEvent("download", { timeout: 15_000 }).catch(() => null);
      await click(page, `export.${name}`);
      d = await download;
    }
    if (!d) await shot(page, "no-download");
    assert.equal(d?.suggestedFilename(), name);
    return readFileSync(await d.path());
  };
  // the form as it is shown when the page opens is the page's defaults, and those are the program's
  const data = { from: "planted", seed: 1, train: 20_000, valid: 4_000 };
  const want = await trainIn(page, { data, device: "cpu", steps: 20 });
  const [head, ...rows] = (await save("overview-loss.csv")).toString().trim().split("\n");
  assert.equal(head, "run,step,seconds,rows,loss");
  const numbers = rows.map((r) => r.slice(r.lastIndexOf('"') + 2).split(",").map(Number));
  const steps = want.events.filter((e) => e.type === "step");
  assert.ok(steps.length >= 4, `${steps.length}`);
  assert.deepEqual(numbers.map((n) => [n[0], n[2], n[3]]), steps.map((e) => [e.step, e.rows, e.loss]));
  const bytes = await save("overview-loss.png");
  const seen = await page.evaluate(async (bytes) => {
    const image = await createImageBitmap(new Blob([new Uint8Array(bytes)], { type: "image/png" }));
    const { width, height } = image;
    const canvas = new OffscreenCanvas(width, height).getContext("2d");
    canvas.drawImage(image, 0, 0);
    const { data } = canvas.getImageData(0, 0, width, height);
    const colors = new Set();
    let line = 0;
    for (let i = 0; i < data.length; i += 4) {
      const p = [...data.slice(i, i + 3)];
      colors.add(p.join());
      // the first run's, in the light and in the dark theme
      if ([[0x00, 0x72, 0xb2], [0x4f, 0xa8, 0xe0]].some((c) => c.every((v, k) => Math.abs(v - p[k]) < 16))) line++;
    }
    return { width, height, colors: colors.size, line };
  }, [...bytes]);
  console.log(`the picture: ${JSON.stringify(seen)}, ${bytes.length} bytes`);
  assert.ok(seen.width > 250 && seen.height > 150 && seen.colors > 50 && seen.line > 50, JSON.stringify(seen));
  writeFileSync(path.join(out, "exported.png"), bytes);
  await shot(page, "exported");
  assert.deepEqual(problems, []);
  await page.close();
});

test("a file dropped on the page is trained on", { timeout: 280_000 }, async () => {
  const { page, problems } = await open(browser, server.url);
  const file = path.join(folder, "mine.tsv");
  birkhoff("synth", "--rows", "3000", "--seed", "9", "--out", file);
  await page.evaluate((text) => {
    const transfer = new DataTransfer();
    transfer.items.add(new File([text], "mine.tsv"));
    document.querySelector("canvas").dispatchEvent(new DragEvent("drop", { dataTransfer: transfer, bubbles: true }));
  }, readFileSync(file, "utf8"));
  await page.waitForTimeout(500);
  await click(page, "device.CPU");
  await click(page, "train.go");
  await until(page, "steps", (s) => s.train?.phase === "failed" || (s.train?.phase === "training" && s.train.step > 10));
  await page.waitForTimeout(300);
  await shot(page, "dropped");
  await click(page, "train.stop");
  const s = await until(page, "the end", (s) => s.train.phase !== "training");
  assert.equal(s.train.phase, "finished", s.train.error);
  assert.deepEqual(problems, []);
  await page.close();
});

test("the race runs the three modes on the same rows", { timeout: 280_000 }, async () => {
  const { page, problems } = await open(browser, `${server.url}#race`);
  await page.waitForTimeout(300);
  await shot(page, "race-empty");
  await click(page, "device.CPU");
  await click(page, "race.go");
  await until(page, "three runs", (s) => s.race.runs.length === 3 && s.race.runs.every((r) => r.step >= 12), 240_000);
  await page.waitForTimeout(500);
  await shot(page, "race");
  const s = await state(page);
  assert.equal(s.race.error, null);
  assert.ok(s.race.runs.every((r) => r.phase === "training" || r.phase === "finished"), JSON.stringify(s.race));
  assert.deepEqual(problems, []);
  await page.close();
});

test("the explorer answers a drag", { timeout: 120_000 }, async () => {
  const { page, problems } = await open(browser, `${server.url}#sinkhorn`);
  await page.waitForTimeout(500);
  await shot(page, "sinkhorn");
  const before = (await state(page)).sinkhorn;
  const { x, y } = await place(page, "sinkhorn.logit.1.2");
  await page.mouse.move(x, y);
  await page.mouse.down();
  for (let i = 1; i <= 10; i++) {
    await page.mouse.move(x, y - 10 * i);
    await page.waitForTimeout(30);
  }
  await page.mouse.up();
  await page.waitForTimeout(300);
  const after = (await state(page)).sinkhorn;
  assert.ok(after.logits[6] > before.logits[6] + 1, `${before.logits[6]} to ${after.logits[6]}`);
  assert.ok(after.matrix[6] > before.matrix[6], "more of stream 2 goes to stream 1");
  const rows = [0, 1, 2, 3].map((o) => after.matrix.slice(4 * o, 4 * o + 4).reduce((a, b) => a + b));
  rows.forEach((s) => assert.ok(Math.abs(s - 1) < 1e-9));
  await shot(page, "sinkhorn-dragged");
  await click(page, "sinkhorn.preset.extreme");
  await page.waitForTimeout(200);
  assert.ok((await state(page)).sinkhorn.matrix.every(Number.isFinite));
  await shot(page, "sinkhorn-extreme");
  await click(page, "theme");
  await page.waitForTimeout(300);
  await shot(page, "sinkhorn-other-theme");
  assert.deepEqual(problems, []);
  await page.close();
});

test("scores in the page are those of birkhoff predict", { timeout: 280_000 }, async () => {
  nativeTwenty("mhc");
  const parent = path.join(folder, "score");
  const setup = twenty("mhc");
  const dir = mkdtempSync(parent);
  nativeRun(dir, setup);
  const rows = path.join(dir, "valid.tsv");
  birkhoff("predict", path.join(dir, "run"), "--data", rows, "--out", path.join(dir, "scores.csv"), "--device", "cpu");
  const column = (csv, k) => csv.trim().split("\n").slice(1).map((l) => Number(l.split(",")[k]));
  const want = readFileSync(path.join(dir, "scores.csv"), "utf8");
  const bytes = (name) => [...readFileSync(path.join(dir, name))];
  const files = ["run/config.toml", "run/vocab.json", "run/weights.safetensors", "valid.tsv"].map(bytes);
  for (const device of ["cpu", "webgpu"]) {
    const { page, problems } = await open(browser, server.url);
    const got = await page.evaluate(
      async ([files, device]) => JSON.parse(await window.birkhoff.score_files(...files.map((f) => new Uint8Array(f)), device)),
      [files, device]);
    const [a, b] = [column(got.csv, 0), column(want, 0)];
    assert.equal(a.length, b.length);
    const worst = Math.max(...a.map((x, i) => Math.abs(x - b[i])));
    console.log(`${device}: largest difference of a score ${worst.toExponential(1)}`);
    assert.ok(worst < 1e-5, `${worst}`);
    assert.equal(got.metrics.rows, b.length);
    assert.deepEqual(problems, []);
    await page.close();
  }
  // the same through the page itself
  const { page, problems } = await open(browser, `${server.url}#score`);
  await page.waitForTimeout(300);
  await shot(page, "score-empty");
  await page.evaluate(([files]) => {
    const names = ["config.toml", "vocab.json", "weights.safetensors", "valid.tsv"];
    files.forEach((f, i) => window.birkhoff.give_file(names[i], new Uint8Array(f)));
  }, [files]);
  await page.waitForTimeout(300);
  await click(page, "device.CPU");
  await click(page, "score.go");
  await until(page, "scores", (s) => s.score.rows || s.score.error);
  assert.equal((await state(page)).score.error, null);
  await page.waitForTimeout(300);
  await shot(page, "score");
  const { x, y } = await place(page, "score.download");
  const download = page.waitForEvent("download");
  await page.mouse.click(x, y);
  const file = await (await download).path();
  assert.ok(existsSync(file));
  const a = column(readFileSync(file, "utf8"), 0);
  const b = column(want, 0);
  assert.ok(a.length === b.length && a.every((v, i) => Math.abs(v - b[i]) < 1e-5));
  assert.deepEqual(problems, []);
  await page.close();
});

test("damaged files are refused with one line", { timeout: 120_000 }, async () => {
  const { page, problems } = await open(browser, server.url);
  const refuse = (files) => page.evaluate(async (files) => {
    try {
      await window.birkhoff.score_files(...files.map((t) => new TextEncoder().encode(t)), "cpu");
      return "no error";
    } catch (e) {
      return e.message;
    }
  }, files);
  assert.match(await refuse(["[model]\nlayrs = 2", "", "", "x"]), /config.toml:2.*layrs/);
  assert.match(await refuse(["", "{}", "", "x"]), /vocab.json/);
  const error = await page.evaluate(async () => {
    try {
      await window.birkhoff.train(JSON.stringify({ set: ["model.layers=0"], data: { from: "planted", seed: 1, train: 10, valid: 10 } }));
      return "no error";
    } catch (e) {
      return e.message;
    }
  });
  assert.match(error, /layers/);
  assert.deepEqual(problems, []);
  await page.close();
});

test("without WebGPU the CPU trains", { timeout: 200_000 }, async () => {
  const { page, problems } = await open(browser, server.url, {
    before: () => Object.defineProperty(Navigator.prototype, "gpu", { get: () => undefined }),
  });
  const setup = twenty("mhc");
  const got = await trainIn(page, { ...setup, device: "auto" });
  assert.match(got.device, /CPU/);
  close(losses(got.events), losses(nativeTwenty("mhc")), 1e-3, "loss");
  const refused = await page.evaluate(async (s) => {
    try {
      await window.birkhoff.train(JSON.stringify(s));
      return "no error";
    } catch (e) {
      return e.message;
    }
  }, { ...setup, device: "webgpu" });
  assert.match(refused, /WebGPU/);
  assert.deepEqual(problems, []);
  await page.close();
});

test("a lost device ends the run with a message, and the page goes on", { timeout: 200_000 }, async () => {
  const { page, problems } = await open(browser, server.url, {
    before: () => {
      const request = GPUAdapter.prototype.requestDevice;
      GPUAdapter.prototype.requestDevice = async function (...args) {
        window.device = await request.apply(this, args);
        return window.device;
      };
    },
  });
  await click(page, "device.WebGPU");
  await click(page, "train.go");
  await until(page, "steps", (s) => s.train?.phase === "training" && s.train.step > 3);
  await page.evaluate(() => window.device.destroy());
  const s = await until(page, "the message", (s) => s.train.phase === "failed");
  assert.match(s.train.error, /lost|destroyed/i);
  await page.waitForTimeout(500);
  await shot(page, "lost-device");
  await click(page, "device.CPU");
  await click(page, "train.go");
  await until(page, "a new run", (s) => s.train.phase === "training" && s.train.step > 3);
  assert.deepEqual(problems.filter((p) => !/destroy|lost|Device/i.test(p)), []);
  await page.close();
});

test("where nothing can be drawn the page says so", { timeout: 60_000 }, async () => {
  const page = await browser.newPage();
  await page.addInitScript(() => {
    HTMLCanvasElement.prototype.getContext = () => null;
    Object.defineProperty(Navigator.prototype, "gpu", { get: () => undefined });
  });
  await page.goto(server.url);
  const text = await page.waitForSelector(".notice").then((e) => e.textContent());
  assert.match(text, /Neither WebGPU nor WebGL2/);
  await shot(page, "nothing");
  await page.close();
});
