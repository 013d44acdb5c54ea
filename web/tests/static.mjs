// A static file server with nothing but node.

import { createServer } from "node:http";
import { readFile } from "node:fs/promises";
import path from "node:path";

const TYPES = {
  ".html": "text/html; charset=utf-8",
  ".js": "text/javascript",
  ".wasm": "application/wasm",
  ".svg": "image/svg+xml",
};

export async function serve(folder, under = "/", port = 0) {
  const server = createServer(async (request, response) => {
    const at = decodeURIComponent(new URL(request.url, "http://localhost").pathname);
    if (!at.startsWith(under)) return response.writeHead(404).end();
    // normalised as an absolute path first: no .. leads out of the folder
    const file = path.join(folder, path.normalize("/" + (at.slice(under.length) || "index.html")));
    try {
      const body = await readFile(file);
      response.writeHead(200, { "content-type": TYPES[path.extname(file)] ?? "application/octet-stream" }).end(body);
    } catch {
      response.writeHead(404).end();
    }
  });
  await new Promise((go) => server.listen(port, "127.0.0.1", go));
  return { url: `http://127.0.0.1:${server.address().port}${under}`, close: () => server.close() };
}
