//! Work in slices: as much as fits in a frame, then the page's turn.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;

use birkhoff::graph::exec::Device;
use js_sys::Promise;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;

/// Milliseconds of a frame that work may take, all runs together; the rest is for drawing.
const BUDGET_MS: f64 = 12.0;
/// The same in a hidden tab, which draws nothing and is woken once a second.
const HIDDEN_MS: f64 = 200.0;
/// Steps a frame on WebGPU at most: beyond this the queue only grows.
const MOST: u32 = 64;

thread_local! {
    static ACTIVE: Cell<u32> = const { Cell::new(0) };
}

/// Milliseconds since the page was opened.
pub fn now() -> f64 {
    web_sys::window().and_then(|w| w.performance()).map_or(0.0, |p| p.now())
}

fn hidden() -> bool {
    web_sys::window().and_then(|w| w.document()).is_some_and(|d| d.hidden())
}

/// The next frame, or a quarter of a second where frames do not come (a hidden tab).
pub async fn next_frame() {
    let promise = Promise::new(&mut |resolve, _| {
        let Some(window) = web_sys::window() else { return };
        // Resolving twice is nothing.
        let wait = if hidden() { 0 } else { 250 };
        let _ = window.request_animation_frame(&resolve);
        let _ = window.set_timeout_with_callback_and_timeout_and_arguments_0(&resolve, wait);
    });
    let _ = JsFuture::from(promise).await;
}

/// Waits until WebGPU has done what was submitted.
async fn device_done(device: &Device) {
    let Device::Gpu(gpu, _) = device else { return };
    let queue = gpu.queue().clone();
    let promise = Promise::new(&mut |resolve, _| {
        queue.on_submitted_work_done(move || {
            let _ = resolve.call0(&JsValue::UNDEFINED);
        });
    });
    let _ = JsFuture::from(promise).await;
}

/// Decides, step by step, when to let the page have its turn.
pub struct Pace {
    device: Device,
    begin: f64,
    steps: u32,
    allowed: u32,
    /// Milliseconds a step, a moving average.
    pub step_ms: f64,
    /// Steps in the last frame.
    pub steps_per_frame: u32,
}

impl Pace {
    /// A new task; several share a frame.
    pub fn new(device: &Device) -> Pace {
        ACTIVE.set(ACTIVE.get() + 1);
        Pace { device: device.clone(), begin: now(), steps: 0, allowed: 1, step_ms: 0.0, steps_per_frame: 0 }
    }

    fn budget(&self) -> f64 {
        (if hidden() { HIDDEN_MS } else { BUDGET_MS }) / f64::from(ACTIVE.get().max(1))
    }

    /// After a step: what to wait for, if it is the page's turn.
    pub fn step(&mut self) -> Option<Pin<Box<dyn Future<Output = ()> + '_>>> {
        self.steps += 1;
        let spent = now() - self.begin;
        let full = matches!(self.device, Device::Gpu(..)) && self.steps >= self.allowed;
        (full || spent >= self.budget()).then(|| Box::pin(self.turn()) as Pin<Box<_>>)
    }

    async fn turn(&mut self) {
        // WebGPU runs behind: without this wait the queue, and with it the page's own drawing, would lag.
        device_done(&self.device).await;
        let took = now() - self.begin;
        self.steps_per_frame = self.steps;
        let each = took / f64::from(self.steps.max(1));
        self.step_ms = if self.step_ms == 0.0 { each } else { 0.8 * self.step_ms + 0.2 * each };
        self.allowed = if took < self.budget() / 2.0 {
            (self.allowed * 2).min(MOST)
        } else if took > self.budget() {
            (self.allowed / 2).max(1)
        } else {
            self.allowed
        };
        next_frame().await;
        self.steps = 0;
        self.begin = now();
    }
}

impl Drop for Pace {
    fn drop(&mut self) {
        ACTIVE.set(ACTIVE.get().saturating_sub(1));
    }
}
