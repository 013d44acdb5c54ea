//! Pictures of every view, and what keys and buttons do.

use std::cell::RefCell;
use std::path::Path;
use std::rc::Rc;

use birkhoff::dashboard::{Dashboard, Exporter, FolderSource, SharedRun, View};
use egui::{Key, Theme, vec2};
use egui_kittest::kittest::Queryable;
use egui_kittest::{Harness, SnapshotOptions};

use super::recorded::{Recorded, on_ranks, three};

/// Drivers differ in the last bit of a blend and in the edges of glyphs; a moved label or a wrong colour
/// differs in far more pixels.
fn options() -> SnapshotOptions {
    SnapshotOptions::new().threshold(1.5).max_failed_pixels(150)
}

pub fn vulkan() -> bool {
    let found =
        birkhoff::gpu::adapter::list_adapters().iter().any(|a| a.backend.eq_ignore_ascii_case("vulkan"));
    if !found {
        println!("SKIP: no Vulkan driver to draw with");
    }
    found
}

pub type App = Harness<'static, Dashboard>;

/// Over the margin that the harness leaves.
fn whole_window(ui: &mut egui::Ui, d: &mut Dashboard) {
    let window = egui::UiBuilder::new().max_rect(ui.ctx().content_rect());
    ui.scope_builder(window, |ui| {
        ui.set_clip_rect(ui.ctx().content_rect());
        d.ui(ui);
    });
}

pub fn harness(dashboard: Dashboard, theme: Theme) -> App {
    Harness::builder()
        .with_size(vec2(1100.0, 700.0))
        .with_theme(theme)
        .with_options(options())
        .with_max_steps(30)
        .wgpu()
        .build_ui_state(whole_window, dashboard)
}

fn on(folder: &Path) -> Dashboard {
    let mut d = Dashboard::new();
    for p in three(folder) {
        d.add(Box::new(FolderSource::new(p)));
    }
    d.poll();
    while d.behind() {
        d.poll();
    }
    assert_eq!((0..3).map(|i| d.run(i).expect("run").problems.len()).sum::<usize>(), 0);
    d
}

fn picture(view: View, theme: Theme, name: &str, set_up: impl FnOnce(&mut App)) {
    if !vulkan() {
        return;
    }
    let folder = tempfile::tempdir().expect("folder");
    let mut d = on(folder.path());
    d.select(2);
    d.show(view);
    let mut h = harness(d, theme);
    h.run_steps(4);
    set_up(&mut h);
    h.run_steps(4);
    h.snapshot(name);
}

#[test]
fn overview_dark() {
    picture(View::Overview, Theme::Dark, "overview_dark", |_| ());
}

#[test]
fn overview_light_smoothed_by_time() {
    picture(View::Overview, Theme::Light, "overview_light", |h| {
        h.get_all_by_label("time").next().expect("choice").click();
        h.get_by_label("log x").click();
        h.get_by_role_and_label(egui::accesskit::Role::Slider, "smoothing").set_value_accesskit(0.9);
    });
}

#[test]
fn residual_light() {
    picture(View::Residual, Theme::Light, "residual_light", |_| ());
}

#[test]
fn residual_dark_one_run_earlier() {
    picture(View::Residual, Theme::Dark, "residual_dark", |h| {
        h.get_by_label("selected run only").click();
        h.key_press(Key::ArrowUp);
        for _ in 0..4 {
            h.key_press(Key::ArrowLeft);
            h.run_steps(1);
        }
    });
}

#[test]
fn gains_light() {
    picture(View::Gains, Theme::Light, "gains_light", |_| ());
}

#[test]
fn gains_dark_side_by_side() {
    picture(View::Gains, Theme::Dark, "gains_dark", |h| h.get_by_label("side by side").click());
}

#[test]
fn streams_light() {
    picture(View::Streams, Theme::Light, "streams_light", |_| ());
}

#[test]
fn time_dark() {
    picture(View::Time, Theme::Dark, "time_dark", |_| ());
}

#[test]
fn model_light() {
    picture(View::Model, Theme::Light, "model_light", |_| ());
}

#[test]
fn hovering_shows_the_values_of_all_runs() {
    picture(View::Overview, Theme::Light, "overview_hover", |h| h.hover_at(egui::pos2(420.0, 260.0)));
}

#[test]
fn without_runs_it_says_how_to_make_one() {
    if !vulkan() {
        return;
    }
    let mut h = harness(Dashboard::new(), Theme::Light);
    h.run_steps(3);
    h.snapshot("empty_light");
}

#[test]
fn what_is_wrong_with_a_run_is_shown() {
    if !vulkan() {
        return;
    }
    let run = SharedRun::new();
    let mut d = Dashboard::new();
    d.add(Box::new(run.source("broken")));
    run.problem("metrics.jsonl: line 12 cannot be read: expected value at line 1 column 1; left out");
    run.problem("snapshots/step-000000120.safetensors: no safetensors file: header too large");
    let mut h = harness(d, Theme::Dark);
    h.run_steps(3);
    h.snapshot("problems_dark");
}

#[test]
fn help_shows_the_keys() {
    picture(View::Model, Theme::Dark, "help_dark", |h| h.key_press(Key::Questionmark));
}

/// Without pictures: any machine can run it.
fn keys_app(folder: &Path) -> App {
    Harness::builder()
        .with_size(vec2(1100.0, 700.0))
        .with_max_steps(30)
        .build_ui_state(|ui, d: &mut Dashboard| d.ui(ui), on(folder))
}

#[test]
fn digits_switch_views_and_d_the_theme() {
    let folder = tempfile::tempdir().expect("folder");
    let mut h = keys_app(folder.path());
    h.run_steps(2);
    let keys = [Key::Num2, Key::Num3, Key::Num4, Key::Num5, Key::Num6, Key::Num1];
    for (k, v) in keys.into_iter().zip(View::ALL.into_iter().cycle().skip(1)) {
        h.key_press(k);
        h.run_steps(2);
        assert_eq!(h.state().view(), v);
    }
    let dark = h.ctx.theme() == Theme::Dark;
    h.key_press(Key::D);
    h.run_steps(2);
    assert_ne!(h.ctx.theme() == Theme::Dark, dark);
    h.key_press(Key::Questionmark);
    h.run_steps(2);
    assert!(h.query_by_label("the views").is_some());
    h.key_press(Key::Escape);
    h.run_steps(2);
    assert!(h.query_by_label("the views").is_none());
}

#[test]
fn arrows_move_the_step_and_space_plays() {
    let folder = tempfile::tempdir().expect("folder");
    let mut h = keys_app(folder.path());
    h.state_mut().show(View::Gains);
    h.run_steps(2);
    assert!(h.query_by_label("step 3,000").is_some());
    h.key_press(Key::ArrowLeft);
    h.run_steps(2);
    assert!(h.query_by_label("step 2,850").is_some());
    h.key_press(Key::ArrowRight);
    h.run_steps(2);
    assert!(h.query_by_label("step 3,000").is_some());
    h.key_press(Key::Space);
    h.run_steps(1);
    assert!(h.query_by_label("step 0").is_some());
    // a quarter of a second a frame: it plays on, and stops at the newest
    h.run_steps(100);
    assert!(h.query_by_label("step 3,000").is_some() && h.query_by_label("Play").is_some());
}

/// Keeps what is exported.
#[derive(Clone, Default)]
struct Kept(Rc<RefCell<Vec<(String, Vec<u8>)>>>);

impl Exporter for Kept {
    fn save(&mut self, file_name: &str, bytes: Vec<u8>) -> Result<String, String> {
        self.0.borrow_mut().push((file_name.into(), bytes));
        Ok(format!("Saved {file_name}"))
    }
}

#[test]
fn every_plot_exports_its_numbers() {
    let folder = tempfile::tempdir().expect("folder");
    let mut h = keys_app(folder.path());
    let kept = Kept::default();
    h.state_mut().set_exporter(Box::new(kept.clone()));
    h.state_mut().select(2);
    let expected = [6, 6, 4, 6, 3, 1];
    for (v, n) in View::ALL.into_iter().zip(expected) {
        kept.0.borrow_mut().clear();
        h.state_mut().show(v);
        h.run_steps(2);
        for i in 0..n {
            h.get_all_by_label("CSV").nth(i).expect("button").click_accesskit();
            h.run_steps(2);
        }
        assert_eq!(h.query_all_by_label("CSV").count(), n, "{v:?}");
        let files = kept.0.borrow();
        let mut names: Vec<&str> = files.iter().map(|f| f.0.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), n, "{v:?}: {names:?}");
        for (name, bytes) in files.iter() {
            let text = std::str::from_utf8(bytes).expect("text");
            // commas between quotes are text
            let count = |l: &str| l.split('"').step_by(2).map(|s| s.matches(',').count()).sum::<usize>();
            let columns = count(text.lines().next().expect("head"));
            assert!(text.lines().count() > 1, "{name} is empty");
            assert!(text.lines().all(|l| count(l) == columns), "{name}");
        }
    }
    // a value of the file is the value of the run
    h.state_mut().show(View::Overview);
    kept.0.borrow_mut().clear();
    h.run_steps(2);
    h.get_all_by_label("CSV").next().expect("button").click_accesskit();
    h.run_steps(2);
    let text = String::from_utf8(kept.0.borrow()[0].1.clone()).expect("text");
    let birkhoff::train::trainer::Event::Step { loss, .. } =
        (Recorded { mode: "hc", seed: 2, done: 0 }).step(20)
    else {
        panic!("a step")
    };
    assert!(text.lines().any(|l| l.starts_with("hc,20,") && l.ends_with(&format!(",{loss}"))));
}

/// Two runs on several ranks, one on one.
fn ranks_app(folder: &Path) -> Dashboard {
    let mut d = Dashboard::new();
    for path in [
        Recorded { mode: "shortcut", seed: 1, done: 900 }.write(folder, "shortcut"),
        on_ranks(folder, "four-mhc", 4),
        on_ranks(folder, "two-mhc", 2),
    ] {
        d.add(Box::new(FolderSource::new(path)));
    }
    d.poll();
    while d.behind() {
        d.poll();
    }
    assert!((0..3).all(|i| d.run(i).expect("run").problems.is_empty()));
    d
}

#[test]
fn ranks_light() {
    if !vulkan() {
        return;
    }
    let folder = tempfile::tempdir().expect("folder");
    let mut h = Harness::builder()
        .with_size(vec2(1100.0, 900.0))
        .with_theme(Theme::Light)
        .with_options(options())
        .with_max_steps(30)
        .wgpu()
        .build_ui_state(whole_window, ranks_app(folder.path()));
    h.run_steps(4);
    h.snapshot("ranks_light");
}

#[test]
fn ranks_are_shown_where_there_are_several() {
    let folder = tempfile::tempdir().expect("folder");
    let mut h = Harness::builder()
        .with_size(vec2(1100.0, 900.0))
        .with_max_steps(30)
        .build_ui_state(|ui, d: &mut Dashboard| d.ui(ui), ranks_app(folder.path()));
    let kept = Kept::default();
    h.state_mut().set_exporter(Box::new(kept.clone()));
    h.run_steps(2);
    assert_eq!(h.query_all_by_label("CSV").count(), 8);
    for i in [6, 7] {
        h.get_all_by_label("CSV").nth(i).expect("button").click_accesskit();
        h.run_steps(2);
    }
    {
        let files = kept.0.borrow();
        let lines = |i: usize| std::str::from_utf8(&files[i].1).expect("text").lines().count();
        assert_eq!((files[0].0.as_str(), lines(0)), ("overview-ranks-waiting.csv", 1 + 2 * 90));
        assert_eq!((files[1].0.as_str(), lines(1)), ("overview-ranks.csv", 1 + 4 + 2));
    }
    // without the runs on several ranks there is no word of them
    for name in ["four-mhc", "two-mhc"] {
        assert!(h.query_by_label("Ranks").is_some());
        h.get_by_label(&format!("hide {name}")).click();
        h.run_steps(2);
    }
    assert_eq!(h.query_all_by_label("CSV").count(), 6);
    assert!(h.query_by_label("Ranks").is_none() && h.query_by_label("Ranks wait").is_none());
}

#[test]
fn a_plot_exports_its_picture_with_a_legend() {
    if !vulkan() {
        return;
    }
    let folder = tempfile::tempdir().expect("folder");
    let kept = Kept::default();
    let mut d = on(folder.path());
    d.set_exporter(Box::new(kept.clone()));
    d.show(View::Gains);
    let mut h = harness(d, Theme::Light);
    h.run_steps(3);
    h.get_all_by_label("PNG").next().expect("button").click();
    h.run_steps(6);
    let files = kept.0.borrow();
    assert_eq!((files.len(), files[0].0.as_str()), (1, "gains-forward-depth.png"));
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("exported.png");
    std::fs::write(&out, &files[0].1).expect("write");
    println!("the exported picture: {}", out.display());
    let image = image_of(&files[0].1);
    assert!(image.0 > 300 && image.1 > 200, "{} x {}", image.0, image.1);
    // the colour of each of the three runs is in it
    for rgb in [[0x00, 0x72, 0xb2], [0xd5, 0x5e, 0x00], [0x00, 0x8f, 0x68]] {
        let near = |p: &[u8]| rgb.iter().zip(p).all(|(a, b): (&u8, _)| a.abs_diff(*b) < 16);
        let found = image.2.chunks(4).filter(|p| near(p)).count();
        assert!(found > 20, "{rgb:?} in {found} pixels");
    }
}

/// Width, height, RGBA.
pub fn image_of(bytes: &[u8]) -> (u32, u32, Vec<u8>) {
    let mut r = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().expect("head");
    let mut out = vec![0; r.output_buffer_size().expect("size")];
    r.next_frame(&mut out).expect("frame");
    (r.info().width, r.info().height, out)
}
