// The built page in a headless Chromium, and the native program beside it.

import { existsSync, mkdirSync } from "node:fs";
import { execFileSync } from "node:child_process";
import path from "node:path";
import { fileURLToPath } from "node:url";
import { chromium } from "playwright-core";
import { serve } from "./static.mjs";

const here = path.dirname(fileURLToPath(import.meta.url));
export const dist = process.env.BIRKHOFF_DIST ?? path.join(here, "..", "dist");
export const out = path.join(here, "out");
export const binary = process.env.BIRKHOFF;
mkdirSync(out, { recursive: true });

// Below a folder: the page must work from any path.
export const serveDist = () => serve(dist, "/some/where/");

export function findChromium() {
  const names = [process.env.CHROMIUM, "/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"];
  return names.find((n) => n && existsSync(n));
}

// WebGPU for computing works with the first two; drawing on a machine without a GPU needs the others.
const FLAGS = ["--no-sandbox", "--enable-unsafe-webgpu", "--enable-features=Vulkan", "--use-vulkan=swiftshader", "--use-angle=swiftshader"];

export async function launch(extra = []) {
  return chromium.launch({ executablePath: findChromium(), headless: true, args: [...FLAGS, ...extra] });
}

// A page that has loaded, and the list of everything that went wrong in it.
export async function open(browser, url, { before, width = 1280, height = 800 } = {}) {
  const page = await browser.newPage({ viewport: { width, height } });
  const problems = [];
  page.on("pageerror", (e) => problems.push(`page error: ${e.message}`));
  page.on("console", (m) => {
    if (m.type() === "error" && !/favicon/.test(m.text())) problems.push(`console: ${m.text()}`);
  });
  page.on("crash", () => problems.push("the page crashed"));
  if (before) await page.addInitScript(before);
  await page.goto(url);
  await page.waitForFunction(() => window.birkhoff?.ready, null, { timeout: 60_000 });
  return { page, problems };
}

export function birkhoff(...args) {
  return execFileSync(binary, args, { encoding: "utf8", maxBuffer: 1 << 28, stdio: ["ignore", "pipe", "pipe"] });
}

// JSON lines of a native run on the CPU with the same rows as the page makes.
export function nativeRun(folder, setup) {
  const { seed, train, valid } = setup.data;
  const file = (n) => path.join(folder, n);
  birkhoff("synth", "--rows", `${train}`, "--seed", `${seed}`, "--out", file("train.tsv"));
  birkhoff("synth", "--rows", `${valid}`, "--seed", `${seed + 1}`, "--out", file("valid.tsv"));
  const sets = setup.set.flatMap((s) => ["--set", s]);
  const lines = birkhoff("train", "--train", file("train.tsv"), "--valid", file("valid.tsv"), "--format", "criteo",
    "--out", file("run"), "--device", "cpu", "--json", ...sets);
  return lines.split("\n").filter(Boolean).map((l) => JSON.parse(l));
}
