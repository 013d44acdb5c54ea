//! Colours: a light and a dark theme, a palette of runs that colour-blind readers can tell apart, and the
//! scales of heat maps.

use egui::{Color32, CornerRadius, Stroke, Theme, Visuals};

const fn rgb(hex: u32) -> Color32 {
    Color32::from_rgb((hex >> 16) as u8, (hex >> 8) as u8, hex as u8)
}

/// The colours of a theme.
#[derive(Debug)]
pub struct Palette {
    /// Whether it is the dark one.
    pub dark: bool,
    /// Behind everything.
    pub background: Color32,
    /// A plot's card.
    pub card: Color32,
    /// Lines around cards.
    pub border: Color32,
    /// Text.
    pub text: Color32,
    /// Text that matters less.
    pub weak: Color32,
    /// Grid lines.
    pub grid: Color32,
    /// What is chosen.
    pub accent: Color32,
    /// Something is wrong.
    pub warn: Color32,
    /// The zone where gains are harmless.
    pub band: Color32,
    /// An empty part of a bar.
    pub track: Color32,
    runs: [Color32; 10],
    sequential: [Color32; 6],
    diverging: [Color32; 7],
}

// Okabe and Ito's colours and a few of Tol's, the light ones darkened on white and the dark ones lightened
// on black until each stands out from the ground by 3 : 1.
static LIGHT: Palette = Palette {
    dark: false,
    background: rgb(0xf4f5f7),
    card: rgb(0xffffff),
    border: rgb(0xdcdfe4),
    text: rgb(0x1c2128),
    weak: rgb(0x5c6570),
    grid: rgb(0xb8bec6),
    accent: rgb(0x0b62a8),
    warn: rgb(0xb04a00),
    band: rgb(0xdff0e6),
    track: rgb(0xe6e8ec),
    runs: [
        rgb(0x0072b2),
        rgb(0xd55e00),
        rgb(0x008f68),
        rgb(0xb04f8a),
        rgb(0xa87b00),
        rgb(0x3a98cf),
        rgb(0x882255),
        rgb(0x6f7d1c),
        rgb(0x332288),
        rgb(0x6b7280),
    ],
    sequential: [rgb(0xf7fbff), rgb(0xd2e3f3), rgb(0x94c4df), rgb(0x4a97c9), rgb(0x1764ab), rgb(0x08306b)],
    diverging: [
        rgb(0xb2182b),
        rgb(0xef8a62),
        rgb(0xfddbc7),
        rgb(0xf7f7f7),
        rgb(0xd1e5f0),
        rgb(0x67a9cf),
        rgb(0x2166ac),
    ],
};

static DARK: Palette = Palette {
    dark: true,
    background: rgb(0x14171c),
    card: rgb(0x1c2027),
    border: rgb(0x2e343d),
    text: rgb(0xe4e7eb),
    weak: rgb(0x9aa4b0),
    grid: rgb(0x4a525d),
    accent: rgb(0x6cb6f0),
    warn: rgb(0xf2a65a),
    band: rgb(0x1f3a2e),
    track: rgb(0x2b3038),
    runs: [
        rgb(0x4fa8e0),
        rgb(0xee7d2f),
        rgb(0x2dbf94),
        rgb(0xdb8fbd),
        rgb(0xe6b23c),
        rgb(0x8fd0f5),
        rgb(0xc96a94),
        rgb(0xb3bd5a),
        rgb(0x9d93e0),
        rgb(0xa3abb6),
    ],
    sequential: [rgb(0x1a1f2b), rgb(0x1d3d66), rgb(0x1f6fa3), rgb(0x38a3bd), rgb(0x8fd6b4), rgb(0xf3f7b0)],
    diverging: [
        rgb(0xffb48a),
        rgb(0xd6663b),
        rgb(0x7a3b24),
        rgb(0x262b33),
        rgb(0x24507a),
        rgb(0x3d8fd1),
        rgb(0x8cc5f2),
    ],
};

impl Palette {
    /// The palette of what is drawn here.
    pub fn of(ui: &egui::Ui) -> &'static Palette {
        Self::for_dark(ui.visuals().dark_mode)
    }

    /// The dark or the light one.
    pub fn for_dark(dark: bool) -> &'static Palette {
        if dark { &DARK } else { &LIGHT }
    }

    /// The colour of a run, by its place in the list: the same in every view.
    pub fn run(&self, i: usize) -> Color32 {
        self.runs[i % self.runs.len()]
    }

    /// The colour of a kind: a module, a stage.
    pub fn kind(&self, i: usize) -> Color32 {
        self.runs[(i + 4) % self.runs.len()]
    }

    /// From nothing (0) to all (1).
    pub fn sequential(&self, t: f64) -> Color32 {
        between(&self.sequential, t)
    }

    /// From −1 over 0 to 1.
    pub fn diverging(&self, t: f64) -> Color32 {
        between(&self.diverging, (t + 1.0) / 2.0)
    }

    /// Text that can be read on a colour.
    pub fn on(&self, c: Color32) -> Color32 {
        // where black and white contrast equally
        if egui::Rgba::from(c).intensity() > 0.18 { rgb(0x14171c) } else { rgb(0xffffff) }
    }

    fn visuals(&self) -> Visuals {
        let mut v = if self.dark { Visuals::dark() } else { Visuals::light() };
        v.panel_fill = self.background;
        v.window_fill = self.card;
        v.window_stroke = Stroke::new(1.0, self.border);
        v.extreme_bg_color = self.card;
        v.faint_bg_color = self.track.gamma_multiply(0.5);
        v.override_text_color = None;
        v.weak_text_color = Some(self.weak);
        v.warn_fg_color = self.warn;
        v.hyperlink_color = self.accent;
        v.selection.bg_fill = self.accent.gamma_multiply(if self.dark { 0.4 } else { 0.25 });
        v.selection.stroke = Stroke::new(1.0, self.text);
        v.widgets.noninteractive.fg_stroke = Stroke::new(1.0, self.text);
        v.widgets.noninteractive.bg_stroke = Stroke::new(1.0, self.border);
        v.widgets.inactive.fg_stroke = Stroke::new(1.0, self.text);
        v.widgets.inactive.weak_bg_fill = self.track;
        v.widgets.inactive.bg_fill = self.track;
        v.widgets.hovered.weak_bg_fill = self.border;
        v.widgets.hovered.fg_stroke = Stroke::new(1.0, self.text);
        v.widgets.active.fg_stroke = Stroke::new(1.0, self.text);
        for w in [&mut v.widgets.inactive, &mut v.widgets.hovered, &mut v.widgets.active] {
            w.corner_radius = CornerRadius::same(4);
        }
        v
    }
}

/// Gives both themes to a context. [`super::Dashboard::ui`] does so once; a page around it may do so earlier.
pub fn install(ctx: &egui::Context) {
    ctx.set_visuals_of(Theme::Light, LIGHT.visuals());
    ctx.set_visuals_of(Theme::Dark, DARK.visuals());
    ctx.all_styles_mut(|s| {
        s.spacing.item_spacing = egui::vec2(8.0, 6.0);
        s.spacing.button_padding = egui::vec2(8.0, 3.0);
        s.interaction.selectable_labels = false;
        use egui::{FontId, TextStyle};
        s.text_styles.insert(TextStyle::Small, FontId::proportional(11.0));
        s.text_styles.insert(TextStyle::Monospace, FontId::monospace(12.0));
    });
}

fn between(stops: &[Color32], t: f64) -> Color32 {
    if t.is_nan() {
        return rgb(0x80_80_80);
    }
    let x = t.clamp(0.0, 1.0) * (stops.len() - 1) as f64;
    let i = (x as usize).min(stops.len() - 2);
    let f = x - i as f64;
    let mix = |a: u8, b: u8| (f64::from(a) + (f64::from(b) - f64::from(a)) * f).round() as u8;
    let (a, b) = (stops[i], stops[i + 1]);
    Color32::from_rgb(mix(a.r(), b.r()), mix(a.g(), b.g()), mix(a.b(), b.b()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn luminance(c: Color32) -> f64 {
        let f = |v: u8| {
            let x = f64::from(v) / 255.0;
            if x <= 0.04045 { x / 12.92 } else { ((x + 0.055) / 1.055).powf(2.4) }
        };
        0.2126 * f(c.r()) + 0.7152 * f(c.g()) + 0.0722 * f(c.b())
    }

    fn contrast(a: Color32, b: Color32) -> f64 {
        let (x, y) = (luminance(a), luminance(b));
        (x.max(y) + 0.05) / (x.min(y) + 0.05)
    }

    #[test]
    fn text_and_lines_stand_out_from_their_ground() {
        for p in [&LIGHT, &DARK] {
            for ground in [p.card, p.background] {
                assert!(contrast(p.text, ground) > 7.0);
                assert!(contrast(p.weak, ground) > 4.5, "{}", contrast(p.weak, ground));
                assert!(contrast(p.warn, ground) > 4.5, "{}", contrast(p.warn, ground));
            }
            for (i, &c) in p.runs.iter().enumerate() {
                assert!(contrast(c, p.card) > 3.0, "run {i} {}: {}", p.dark, contrast(c, p.card));
            }
            for t in 0..=20 {
                for c in [p.sequential(f64::from(t) / 20.0), p.diverging(f64::from(t) / 10.0 - 1.0)] {
                    assert!(contrast(p.on(c), c) > 3.0, "{t} {}: {}", p.dark, contrast(p.on(c), c));
                }
            }
        }
    }

    #[test]
    fn scales_reach_their_ends() {
        let p = &LIGHT;
        assert_eq!((p.sequential(0.0), p.sequential(2.0)), (p.sequential[0], p.sequential[5]));
        assert_eq!((p.diverging(-1.0), p.diverging(0.0)), (p.diverging[0], p.diverging[3]));
        assert_eq!(p.diverging(1.0), p.diverging[6]);
    }
}
