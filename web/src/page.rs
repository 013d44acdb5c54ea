//! The page: a bar with its four parts, and what they share.

use std::time::Duration;

use birkhoff::dashboard::theme::{self, Palette};
use eframe::egui::{self, Align, Frame, Layout, Margin, Panel, RichText, Theme, Ui};

use crate::explorer::Explorer;
use crate::host;
use crate::race::Race;
use crate::score::Score;
use crate::train::Train;

/// The parts, in the order of the bar.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// A model is trained.
    #[default]
    Train,
    /// Three residual modes side by side.
    Race,
    /// The Sinkhorn iterations by hand.
    Sinkhorn,
    /// A trained run scores a file.
    Score,
}

impl Part {
    const ALL: [Part; 4] = [Part::Train, Part::Race, Part::Sinkhorn, Part::Score];

    fn title(self) -> &'static str {
        match self {
            Part::Train => "Train",
            Part::Race => "Race",
            Part::Sinkhorn => "Sinkhorn",
            Part::Score => "Score",
        }
    }

    fn tip(self) -> &'static str {
        match self {
            Part::Train => "Train a model in this tab and watch it",
            Part::Race => "Shortcut, HC and mHC on the same rows, side by side",
            Part::Sinkhorn => "How a matrix becomes doubly stochastic, and what that does to signals",
            Part::Score => "Score a file with a trained run",
        }
    }

    /// After the `#` of the address.
    pub fn word(self) -> &'static str {
        match self {
            Part::Train => "train",
            Part::Race => "race",
            Part::Sinkhorn => "sinkhorn",
            Part::Score => "score",
        }
    }
}

/// All of the page.
pub struct Page {
    part: Part,
    address: String,
    /// Training and its dashboard.
    pub train: Train,
    /// The race.
    pub race: Race,
    /// The explorer.
    pub explorer: Explorer,
    /// Scoring.
    pub score: Score,
}

impl Page {
    /// A page that shows what the address asks for.
    pub fn new(ctx: &egui::Context) -> Page {
        theme::install(ctx);
        host::remember(ctx);
        Page {
            part: Part::default(),
            address: String::new(),
            train: Train::default(),
            race: Race::default(),
            explorer: Explorer::default(),
            score: Score::default(),
        }
    }

    /// What stands behind the `#` decides, also when the user goes back.
    fn follow_address(&mut self) {
        let hash = web_sys::window().and_then(|w| w.location().hash().ok()).unwrap_or_default();
        if hash == self.address {
            return;
        }
        let word = hash.trim_start_matches('#');
        if let Some(part) = Part::ALL.into_iter().find(|p| p.word() == word) {
            self.part = part;
        }
        self.address = hash;
    }

    fn go(&mut self, part: Part) {
        self.part = part;
        if let Some(w) = web_sys::window() {
            let _ = w.location().set_hash(part.word());
        }
        self.address = format!("#{}", part.word());
    }

    /// The page's state for tests, as JSON.
    pub fn state(&self) -> serde_json::Value {
        serde_json::json!({
            "part": self.part.word(),
            "train": self.train.state(),
            "race": self.race.state(),
            "sinkhorn": self.explorer.state(),
            "score": self.score.state(),
        })
    }

    fn bar(&mut self, ui: &mut Ui) {
        let p = Palette::of(ui);
        ui.horizontal(|ui| {
            ui.label(RichText::new("birkhoff").size(20.0).strong().color(p.accent));
            ui.add_space(12.0);
            for part in Part::ALL {
                let text = RichText::new(part.title()).size(15.0);
                let r = ui.selectable_label(self.part == part, text).on_hover_text(part.tip());
                host::name(format!("part.{}", part.word()), &r);
                if r.clicked() {
                    self.go(part);
                }
            }
            ui.with_layout(Layout::right_to_left(Align::Center), |ui| {
                let (word, to) = if p.dark { ("light", Theme::Light) } else { ("dark", Theme::Dark) };
                let r = ui.button(word).on_hover_text(format!("The {word} theme"));
                host::name("theme", &r);
                if r.clicked() {
                    ui.ctx().set_theme(to);
                }
                if ui.available_width() > 330.0 {
                    let text = "Your rows and models stay in this tab.";
                    ui.label(RichText::new(text).small().color(p.weak));
                }
            });
        });
    }
}

impl eframe::App for Page {
    fn ui(&mut self, ui: &mut Ui, _: &mut eframe::Frame) {
        host::new_frame();
        self.follow_address();
        for file in host::take_given() {
            match self.part {
                Part::Score => self.score.give(file),
                _ => {
                    self.go(Part::Train);
                    self.train.give(file);
                }
            }
        }
        let p = Palette::of(ui);
        let bar = Frame::new().fill(p.card).inner_margin(Margin::symmetric(14, 8));
        Panel::top("bar").frame(bar).show(ui, |ui| self.bar(ui));
        let body = Frame::new().fill(p.background);
        egui::CentralPanel::default().frame(body).show(ui, |ui| match self.part {
            Part::Train => self.train.ui(ui),
            Part::Race => self.race.ui(ui),
            Part::Sinkhorn => self.explorer.ui(ui),
            Part::Score => self.score.ui(ui),
        });
        let busy = self.train.busy() || self.race.busy() || self.score.busy();
        // The address has no event here; and a run's news come without one.
        let next = if busy { 200 } else { 400 };
        ui.ctx().request_repaint_after(Duration::from_millis(next));
    }

    fn as_any_mut(&mut self) -> Option<&mut dyn std::any::Any> {
        Some(self)
    }
}
