//! What the parts of the page are made of.

use birkhoff::dashboard::theme::Palette;
use eframe::egui::{self, Button, Color32, Response, RichText, Ui, vec2};

use crate::host;
use crate::setup::DeviceWord;

/// The button that a part of the page is there for.
pub fn primary(ui: &mut Ui, text: &str, width: f32, enabled: bool) -> Response {
    let text = RichText::new(text).strong().color(Color32::WHITE);
    let button = Button::new(text).fill(Color32::from_rgb(0x0b, 0x62, 0xa8));
    ui.add_enabled_ui(enabled, |ui| ui.add_sized(vec2(width, 32.0), button)).inner
}

/// The width of each of two buttons side by side.
pub fn half_button(ui: &Ui) -> f32 {
    (ui.available_width() - 8.0) / 2.0
}

/// A few lines in the middle of an empty place, not too long to read.
pub fn paragraph(ui: &mut Ui, text: &str) {
    let width = ui.available_width().min(560.0);
    ui.allocate_ui(vec2(width, 0.0), |ui| {
        ui.set_max_width(width);
        let text = RichText::new(text).color(Palette::of(ui).weak);
        ui.add(egui::Label::new(text).wrap().halign(egui::Align::Center));
    });
}

/// A part of the form.
pub fn heading(ui: &mut Ui, text: &str) {
    ui.add_space(8.0);
    ui.label(RichText::new(text).size(15.0).strong());
}

/// The choice of a device.
pub fn device(ui: &mut Ui, word: &mut DeviceWord) {
    ui.horizontal(|ui| {
        ui.spacing_mut().item_spacing.x = 2.0;
        for (w, title, tip) in [
            (DeviceWord::Auto, "auto", "WebGPU on a hardware GPU, else the CPU"),
            (DeviceWord::WebGpu, "WebGPU", "WebGPU, also where only a software driver stands behind it"),
            (DeviceWord::Cpu, "CPU", "The CPU executor, in WebAssembly"),
        ] {
            let r = ui.selectable_label(*word == w, title).on_hover_text(tip);
            host::name(format!("device.{title}"), &r);
            if r.clicked() {
                *word = w;
            }
        }
    });
}
