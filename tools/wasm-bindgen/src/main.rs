//! `bind INPUT.wasm FOLDER NAME`: JavaScript for a wasm module, as `wasm-bindgen --target web` writes it.

use wasm_bindgen_cli_support::Bindgen;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let [_, input, folder, name] = &args[..] else {
        eprintln!("usage: bind INPUT.wasm FOLDER NAME");
        std::process::exit(2);
    };
    let mut bind = Bindgen::new();
    bind.input_path(input).out_name(name).typescript(false).keep_debug(false);
    bind.remove_name_section(true).remove_producers_section(true);
    let done = bind.web(true).and_then(|b| b.generate(folder));
    if let Err(e) = done {
        eprintln!("bind: {e:?}");
        std::process::exit(1);
    }
}
