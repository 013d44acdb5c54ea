//! What JavaScript can call, for the browser tests and for scripts: everything goes in and out as JSON text.

use serde_json::json;
use wasm_bindgen::prelude::*;

use crate::session::{Phase, Session};
use crate::setup::Setup;

fn failed(text: impl Into<String>) -> JsValue {
    js_sys::Error::new(&text.into()).into()
}

/// Trains as `setup` (a [`Setup`]) says and returns `{device, events, summary}`.
#[wasm_bindgen]
pub async fn train(setup: String) -> Result<String, JsValue> {
    let setup: Setup = serde_json::from_str(&setup).map_err(|e| failed(e.to_string()))?;
    let session = Session::default();
    session.run(&setup).await;
    let p = session.0.borrow();
    match &p.phase {
        Phase::Finished(summary) => Ok(json!({
            "device": p.device,
            "events": p.events,
            "summary": **summary,
            "step_ms": p.step_ms,
            "truth_ne": p.truth_ne,
        })
        .to_string()),
        Phase::Failed(e) => Err(failed(e)),
        _ => Err(failed("the run did not end")),
    }
}
