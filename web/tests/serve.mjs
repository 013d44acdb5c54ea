// node serve.mjs FOLDER PORT: a static file server, where python3 is not there.

import { serve } from "./static.mjs";

const [folder, port] = process.argv.slice(2);
const { url } = await serve(folder, "/", Number(port ?? 8080));
console.error(url);
