//! The page around the program: downloads, chosen and dropped files, and where things are drawn (for tests).

use std::cell::RefCell;
use std::collections::BTreeMap;

use birkhoff::dashboard::{Dashboard, Exporter};
use eframe::egui::{Rect, Response};
use wasm_bindgen::prelude::*;

#[wasm_bindgen]
extern "C" {
    #[wasm_bindgen(js_namespace = ["window", "page"])]
    fn choose(accept: &str, many: bool);
    #[wasm_bindgen(js_namespace = ["window", "page"])]
    fn download(name: &str, kind: &str, bytes: &[u8]);
    #[wasm_bindgen(js_namespace = ["window", "page"])]
    fn failed(text: &str);
}

/// A file that the user gave.
#[derive(Clone, Debug)]
pub struct Given {
    /// Its name, without folders.
    pub name: String,
    /// Its contents.
    pub bytes: Vec<u8>,
}

thread_local! {
    static GIVEN: RefCell<Vec<Given>> = const { RefCell::new(Vec::new()) };
    static PLACES: RefCell<BTreeMap<String, Rect>> = const { RefCell::new(BTreeMap::new()) };
    static CONTEXT: RefCell<Option<eframe::egui::Context>> = const { RefCell::new(None) };
}

/// Remembers the context, so that news from outside wake the page.
pub fn remember(ctx: &eframe::egui::Context) {
    CONTEXT.with_borrow_mut(|c| *c = Some(ctx.clone()));
}

/// Draws a frame soon.
pub fn wake() {
    CONTEXT.with_borrow(|c| {
        if let Some(c) = c {
            c.request_repaint();
        }
    });
}

/// Opens the browser's file dialog; the files come by [`take_given`].
pub fn choose_files(accept: &str, many: bool) {
    choose(accept, many);
}

/// The files given since the last call.
pub fn take_given() -> Vec<Given> {
    GIVEN.take()
}

/// A file that was dropped or chosen, from JavaScript.
#[wasm_bindgen]
pub fn give_file(name: String, bytes: Vec<u8>) {
    GIVEN.with_borrow_mut(|g| g.push(Given { name, bytes }));
    wake();
}

/// Offers a file for download.
pub fn save(name: &str, bytes: &[u8]) {
    let kind = match name.rsplit('.').next() {
        Some("csv") => "text/csv",
        Some("png") => "image/png",
        Some("json" | "jsonl") => "application/json",
        _ => "application/octet-stream",
    };
    download(name, kind, bytes);
}

/// Shows a message in place of the page.
pub fn stop_page(text: &str) {
    failed(text);
}

/// The dashboard's files become downloads.
pub struct Downloads;

impl Exporter for Downloads {
    fn save(&mut self, file_name: &str, bytes: Vec<u8>) -> Result<String, String> {
        save(file_name, &bytes);
        Ok(format!("{file_name} is in your downloads"))
    }
}

/// Names the export buttons of a dashboard.
pub fn name_exports(dashboard: &Dashboard) {
    for (file, rect) in dashboard.export_buttons() {
        place(format!("export.{file}"), rect);
    }
}

/// Forgets where things were drawn.
pub fn new_frame() {
    PLACES.with_borrow_mut(BTreeMap::clear);
}

/// Names a widget, so that a test can point at it.
pub fn name(name: impl Into<String>, response: &Response) {
    place(name, response.rect);
}

/// Names a rectangle.
pub fn place(name: impl Into<String>, rect: Rect) {
    PLACES.with_borrow_mut(|p| p.insert(name.into(), rect));
}

/// Where named things are, as JSON: `{name: [x, y, width, height]}` in CSS pixels.
#[wasm_bindgen]
pub fn places() -> String {
    PLACES.with_borrow(|p| {
        let all: serde_json::Map<String, serde_json::Value> = p
            .iter()
            .map(|(k, r)| (k.clone(), serde_json::json!([r.min.x, r.min.y, r.width(), r.height()])))
            .collect();
        serde_json::Value::Object(all).to_string()
    })
}
