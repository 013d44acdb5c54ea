// Loads the program with a progress bar, says what is missing where it cannot run, and hands it files.

const cover = document.getElementById("cover");
const message = document.getElementById("message");

function notice(title, text) {
  cover.hidden = false;
  message.replaceChildren();
  const box = document.createElement("div");
  box.className = "notice";
  const head = document.createElement("strong");
  head.textContent = title;
  const body = document.createElement("p");
  body.textContent = text;
  box.append(head, body);
  message.append(box);
}

function drawable() {
  try {
    return !!document.createElement("canvas").getContext("webgl2");
  } catch {
    return false;
  }
}

// What the program asks of the page.
window.page = {
  choose(accept, many) {
    const input = document.createElement("input");
    input.type = "file";
    input.accept = accept;
    input.multiple = many;
    input.onchange = () => give(input.files);
    input.click();
  },
  download(name, type, bytes) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([bytes], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  },
  failed(text) {
    notice("The page had to stop", `${text}. Reload it to go on; nothing was sent anywhere.`);
  },
};

let program;

async function give(files) {
  for (const file of files) {
    program?.give_file(file.name, new Uint8Array(await file.arrayBuffer()));
  }
}

// A folder dropped on the page: its files, one level deep.
async function filesOf(transfer) {
  const entries = [...(transfer.items ?? [])].map((i) => i.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.some((e) => e.isDirectory)) return [...transfer.files];
  const files = [];
  const file = (e) => new Promise((go, no) => e.file(go, no));
  for (const entry of entries) {
    if (entry.isFile) {
      files.push(await file(entry));
      continue;
    }
    const reader = entry.createReader();
    for (;;) {
      const some = await new Promise((go, no) => reader.readEntries(go, no));
      if (!some.length) break;
      for (const e of some) if (e.isFile) files.push(await file(e));
    }
  }
  return files;
}

let over;
function dragging(on) {
  clearTimeout(over);
  document.body.classList.toggle("dragging", on);
}
addEventListener("dragover", (e) => {
  e.preventDefault();
  dragging(true);
  over = setTimeout(() => dragging(false), 300);
}, true);
addEventListener("drop", (e) => {
  e.preventDefault();
  e.stopPropagation();
  dragging(false);
  filesOf(e.dataTransfer).then(give);
}, true);

// The module with a progress bar; a host that compresses it gives no length to compare with.
async function load(url) {
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
  const size = Number(document.documentElement.dataset.size ?? 5.5e6);
  let seen = 0;
  const bar = document.querySelector("#bar > i");
  const counted = new TransformStream({
    transform(chunk, out) {
      seen += chunk.byteLength;
      if (bar) bar.style.width = `${Math.min(100, (100 * seen) / size)}%`;
      out.enqueue(chunk);
    },
  });
  return new Response(response.body.pipeThrough(counted), { headers: { "content-type": "application/wasm" } });
}

async function start() {
  if (!drawable()) {
    const gpu = navigator.gpu ? "WebGPU is there, but this page draws with WebGL2" : "Neither WebGPU nor WebGL2 is there";
    notice("This browser cannot show the page", `${gpu}. Switch on hardware acceleration, or use a current Chrome, Edge, Firefox or Safari.`);
    return;
  }
  try {
    const module = await import("./birkhoff_web.js");
    await module.default({ module_or_path: await load(new URL("./birkhoff_web_bg.wasm", import.meta.url)) });
    program = module;
    await module.start(document.getElementById("canvas"));
    window.birkhoff = Object.assign(window.birkhoff ?? {}, module, { ready: true });
    cover.hidden = true;
  } catch (e) {
    notice("The page could not start", `${e?.message ?? e}`);
    throw e;
  }
}

start();
