//! Work in slices: as much as fits in a frame, then the page's turn.

use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;

use birkhoff::graph::exec::Device;
use js_sys::Promise;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;

/// Milliseconds of a frame that work may take at least, all runs together; the rest is for drawing.
const BUDGET_MS: f64 = 12.0;
/// The same at most: where drawing itself is slow, work takes as long as drawing, up to this.
const MOST_MS: f64 = 50.0;
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

/// Decides when to let the page have its turn: on WebGPU after so many steps, on the CPU after so much time,
/// if need be in the middle of a step.
pub struct Pace {
    device: Device,
    begin: f64,
    /// Steps since the page had its turn.
    steps: u32,
    allowed: u32,
    /// Milliseconds of work since the last step ended.
    worked: f64,
    /// Milliseconds that the page took for its turns, a moving average.
    waited: f64,
    /// Milliseconds a step, a moving average.
    pub step_ms: f64,
    /// Steps in the last frame; below 1 where a step takes several frames.
    pub steps_per_frame: f64,
    frames: f64,
}

impl Pace {
    /// A new task; several share a frame.
    pub fn new(device: &Device) -> Pace {
        ACTIVE.set(ACTIVE.get() + 1);
        Pace {
            device: device.clone(),
            begin: now(),
            steps: 0,
            allowed: 1,
            worked: 0.0,
            waited: 0.0,
            step_ms: 0.0,
            steps_per_frame: 0.0,
            frames: 0.0,
        }
    }

    fn budget(&self) -> f64 {
        (if hidden() { HIDDEN_MS } else { self.waited.clamp(BUDGET_MS, MOST_MS) })
            / f64::from(ACTIVE.get().max(1))
    }

    /// A step has been taken.
    pub fn stepped(&mut self) {
        self.steps += 1;
    }

    /// Whether the time of this frame is used up.
    pub fn due(&self) -> bool {
        now() - self.begin >= self.budget()
    }

    /// What to wait for, if it is the page's turn.
    pub fn pause(&mut self) -> Option<Pin<Box<dyn Future<Output = ()> + '_>>> {
        let full = matches!(self.device, Device::Gpu(..)) && self.steps >= self.allowed;
        (full || self.due()).then(|| Box::pin(self.turn()) as Pin<Box<_>>)
    }

    async fn turn(&mut self) {
        // WebGPU runs behind: without this wait the queue, and with it the page's own drawing, would lag.
        device_done(&self.device).await;
        let took = now() - self.begin;
        self.worked += took;
        self.frames += 1.0;
        if self.steps > 0 {
            let steps = f64::from(self.steps);
            let each = self.worked / steps;
            self.step_ms = if self.step_ms == 0.0 { each } else { 0.9 * self.step_ms + 0.1 * each };
            self.steps_per_frame = steps / self.frames;
            (self.worked, self.frames) = (0.0, 0.0);
        }
        self.allowed = if took < self.budget() / 2.0 {
            (self.allowed * 2).min(MOST)
        } else if took > self.budget() {
            (self.allowed / 2).max(1)
        } else {
            self.allowed
        };
        let before = now();
        next_frame().await;
        self.begin = now();
        self.waited = 0.8 * self.waited + 0.2 * (self.begin - before);
        self.steps = 0;
    }
}

impl Drop for Pace {
    fn drop(&mut self) {
        ACTIVE.set(ACTIVE.get().saturating_sub(1));
    }
}
