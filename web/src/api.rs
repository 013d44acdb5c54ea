//! What JavaScript can call: the page itself, and for tests and scripts training and scoring without it.
//! Everything goes in and out as JSON text.

use std::cell::RefCell;

use birkhoff::dashboard::SharedRun;
use birkhoff::text::error_line;
use eframe::{WebOptions, WebRunner};
use serde_json::json;
use wasm_bindgen::prelude::*;

use crate::host::{self, Given};
use crate::page::Page;
use crate::score::{Files, score};
use crate::session::{Phase, Session};
use crate::setup::{DeviceWord, Setup};

thread_local! {
    static RUNNER: RefCell<Option<WebRunner>> = const { RefCell::new(None) };
}

fn failed(text: impl Into<String>) -> JsValue {
    js_sys::Error::new(&text.into()).into()
}

fn word(text: &str) -> Result<DeviceWord, JsValue> {
    serde_json::from_value(json!(text)).map_err(|_| failed("the device is auto, webgpu or cpu"))
}

/// Draws the page on a canvas; resolves once it does.
#[wasm_bindgen]
pub async fn start(canvas: web_sys::HtmlCanvasElement) -> Result<(), JsValue> {
    let runner = WebRunner::new();
    // A panic stops all of the program: the page says so instead of standing still.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        hook(info);
        host::stop_page(&format!("It met a mistake of its own: {info}"));
    }));
    let options = WebOptions::default();
    let create = |cx: &eframe::CreationContext<'_>| -> Result<Box<dyn eframe::App>, _> {
        Ok(Box::new(Page::new(&cx.egui_ctx)))
    };
    runner.start(canvas, options, Box::new(create)).await?;
    RUNNER.set(Some(runner));
    Ok(())
}

/// The page's state.
#[wasm_bindgen]
pub fn state() -> Result<String, JsValue> {
    RUNNER.with_borrow(|r| {
        let runner = r.as_ref().ok_or_else(|| failed("the page has not started"))?;
        let page = runner.app_mut::<Page>().ok_or_else(|| failed("the page has stopped"))?;
        Ok(page.state().to_string())
    })
}

/// Trains as `setup` (a [`Setup`]) says and returns `{device, events, summary}`.
#[wasm_bindgen]
pub async fn train(setup: String) -> Result<String, JsValue> {
    let setup: Setup = serde_json::from_str(&setup).map_err(|e| failed(e.to_string()))?;
    let session = Session::default();
    session.0.borrow_mut().shared = SharedRun::new();
    session.run(&setup, None).await;
    let p = session.0.borrow();
    match &p.phase {
        Phase::Finished(summary) => Ok(json!({
            "device": p.device,
            "events": p.events,
            "summary": **summary,
            "step_ms": p.step_ms,
            "truth_ne": p.truth_ne,
            "snapshots": p.store.snapshots.len(),
        })
        .to_string()),
        Phase::Failed(e) => Err(failed(e)),
        _ => Err(failed("the run did not end")),
    }
}

/// Scores a file of rows with a run's files and returns `{device, logits, csv, metrics}`.
#[wasm_bindgen]
pub async fn score_files(
    config: Vec<u8>,
    vocab: Vec<u8>,
    weights: Vec<u8>,
    data: Vec<u8>,
    device: String,
) -> Result<String, JsValue> {
    let word = word(&device)?;
    let mut files = Files::default();
    for (name, bytes) in
        [("config.toml", config), ("vocab.json", vocab), ("weights.safetensors", weights), ("data.tsv", data)]
    {
        files.give(Given { name: name.into(), bytes });
    }
    let s = score(&files, word, &|_, _| ()).await.map_err(|e| failed(error_line(&e)))?;
    Ok(json!({"device": s.device, "logits": s.logits, "csv": s.to_csv(), "metrics": s.metrics}).to_string())
}
