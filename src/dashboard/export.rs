//! What leaves the dashboard: a plot's numbers as CSV, its picture as PNG.

use std::cell::RefCell;
use std::sync::{Arc, Mutex};

use egui::{ColorImage, Context, Id, Rect};

/// Where exported files go: a folder, a browser's downloads. The host supplies it
/// ([`super::Dashboard::set_exporter`]).
pub trait Exporter {
    /// Keeps a file. The answer is what to tell the user: where it is, or why it is not.
    fn save(&mut self, file_name: &str, bytes: Vec<u8>) -> Result<String, String>;
}

/// The exporter of a host that has none.
#[derive(Debug, Default)]
pub struct NoExporter;

impl Exporter for NoExporter {
    fn save(&mut self, file_name: &str, _: Vec<u8>) -> Result<String, String> {
        Err(format!("{file_name} was not saved: this page has nowhere to put files"))
    }
}

/// A field of a table.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// A number; empty in the file if it is not finite.
    Number(f64),
    /// A text.
    Text(String),
}

impl From<f64> for Cell {
    fn from(x: f64) -> Self {
        Cell::Number(x)
    }
}

impl From<usize> for Cell {
    fn from(x: usize) -> Self {
        Cell::Number(x as f64)
    }
}

impl From<&str> for Cell {
    fn from(x: &str) -> Self {
        Cell::Text(x.to_string())
    }
}

impl From<String> for Cell {
    fn from(x: String) -> Self {
        Cell::Text(x)
    }
}

/// The numbers behind a plot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// Heads.
    pub columns: Vec<String>,
    /// Rows, each as long as the heads.
    pub rows: Vec<Vec<Cell>>,
}

impl Table {
    /// A table without rows.
    pub fn new<const N: usize>(columns: [&str; N]) -> Self {
        Table { columns: columns.map(String::from).to_vec(), rows: vec![] }
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, cells: [Cell; N]) {
        self.rows.push(cells.to_vec());
    }

    /// As CSV (RFC 4180): commas, a head, numbers with all their digits.
    pub fn to_csv(&self) -> String {
        let text = |s: &str| {
            if s.contains([',', '"', '\n', '\r']) {
                format!("\"{}\"", s.replace('"', "\"\""))
            } else {
                s.to_string()
            }
        };
        let line = |cells: Vec<String>| cells.join(",") + "\n";
        let mut out = line(self.columns.iter().map(|c| text(c)).collect());
        for r in &self.rows {
            let cell = |c: &Cell| match c {
                Cell::Number(x) if x.is_finite() => x.to_string(),
                Cell::Number(_) => String::new(),
                Cell::Text(s) => text(s),
            };
            out += &line(r.iter().map(cell).collect());
        }
        out
    }
}

/// A picture as PNG.
pub fn png(image: &ColorImage) -> Result<Vec<u8>, String> {
    let mut out = vec![];
    let mut e = png::Encoder::new(&mut out, image.size[0] as u32, image.size[1] as u32);
    e.set_color(png::ColorType::Rgba);
    e.set_depth(png::BitDepth::Eight);
    let bytes: Vec<u8> = image.pixels.iter().flat_map(|p| p.to_srgba_unmultiplied()).collect();
    let write = |e: png::Encoder<'_, &mut Vec<u8>>| -> Result<(), png::EncodingError> {
        let mut w = e.write_header()?;
        w.write_image_data(&bytes)?;
        w.finish()
    };
    write(e).map_err(|e| format!("the picture could not be written: {e}"))?;
    Ok(out)
}

/// The part of a screenshot that shows `rect` (in points), `None` if nothing of it is there.
pub fn crop(image: &ColorImage, rect: Rect, pixels_per_point: f32) -> Option<ColorImage> {
    let at = |v: f32, most: usize| ((v * pixels_per_point).round().max(0.0) as usize).min(most);
    let [w, h] = image.size;
    let (x0, x1) = (at(rect.left(), w), at(rect.right(), w));
    let (y0, y1) = (at(rect.top(), h), at(rect.bottom(), h));
    if x0 >= x1 || y0 >= y1 {
        return None;
    }
    let pixels = (y0..y1).flat_map(|y| image.pixels[y * w + x0..y * w + x1].iter().copied()).collect();
    Some(ColorImage::new([x1 - x0, y1 - y0], pixels))
}

type Slot = Arc<Mutex<Option<Arc<ColorImage>>>>;

/// A plot whose picture was asked for: it is drawn once more with its legend, then photographed.
struct Pending {
    card: Id,
    file: String,
    rect: Option<Rect>,
    /// Frames in which it stood as it shall be seen.
    posed: u32,
    shot: Option<Slot>,
    frames: u32,
}

/// Frames to wait for a screenshot before giving up.
const PATIENCE: u32 = 240;

/// What the exporter answered last.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Notice {
    pub text: String,
    pub ok: bool,
    /// When it was first shown.
    pub since: Option<f64>,
}

pub(crate) struct Exports(RefCell<Inner>);

struct Inner {
    host: Box<dyn Exporter>,
    pending: Option<Pending>,
    notice: Option<Notice>,
    buttons: Vec<(String, Rect)>,
}

impl Exports {
    pub fn new(host: Box<dyn Exporter>) -> Self {
        Exports(RefCell::new(Inner { host, pending: None, notice: None, buttons: vec![] }))
    }

    /// Forgets where the buttons were drawn.
    pub fn begin_frame(&self) {
        self.0.borrow_mut().buttons.clear();
    }

    /// Remembers where the button for a file was drawn.
    pub fn button(&self, file: String, rect: Rect) {
        self.0.borrow_mut().buttons.push((file, rect));
    }

    pub fn buttons(&self) -> Vec<(String, Rect)> {
        self.0.borrow().buttons.clone()
    }

    pub fn set_host(&self, host: Box<dyn Exporter>) {
        self.0.borrow_mut().host = host;
    }

    pub fn save(&self, file: &str, bytes: Vec<u8>) {
        let mut inner = self.0.borrow_mut();
        let (text, ok) = match inner.host.save(file, bytes) {
            Ok(t) => (t, true),
            Err(t) => (t, false),
        };
        inner.notice = Some(Notice { text, ok, since: None });
    }

    fn say(&self, text: impl Into<String>) {
        self.0.borrow_mut().notice = Some(Notice { text: text.into(), ok: false, since: None });
    }

    /// Asks for a card's picture.
    pub fn picture(&self, card: Id, file: String) {
        self.0.borrow_mut().pending =
            Some(Pending { card, file, rect: None, posed: 0, shot: None, frames: 0 });
    }

    /// Whether a card is about to be photographed: it shows its legend instead of its buttons.
    pub fn poses(&self, card: Id) -> bool {
        self.0.borrow().pending.as_ref().is_some_and(|p| p.card == card)
    }

    /// Where the card was drawn, legend and all.
    pub fn posed(&self, card: Id, rect: Rect) {
        if let Some(p) = self.0.borrow_mut().pending.as_mut().filter(|p| p.card == card) {
            p.rect = Some(rect);
            p.posed += 1;
        }
    }

    /// The last word of the exporter, for some seconds.
    pub fn notice(&self, now: f64) -> Option<Notice> {
        let mut inner = self.0.borrow_mut();
        let n = inner.notice.as_mut()?;
        let since = *n.since.get_or_insert(now);
        if now - since > 12.0 {
            inner.notice = None;
        }
        inner.notice.clone()
    }

    /// After everything is drawn: asks for the screenshot, and saves it once it is there.
    pub fn end_frame(&self, ctx: &Context) {
        let mut inner = self.0.borrow_mut();
        let Some(p) = &mut inner.pending else { return };
        ctx.request_repaint();
        p.frames += 1;
        let arrived = p.shot.as_ref().and_then(|s| s.lock().ok()?.take());
        if let Some(image) = arrived {
            let (file, rect) = (std::mem::take(&mut p.file), p.rect);
            inner.pending = None;
            drop(inner);
            let part = rect.and_then(|r| crop(&image, r, ctx.pixels_per_point()));
            match part.ok_or("the plot is not on the screen".to_string()).and_then(|p| png(&p)) {
                Ok(bytes) => self.save(&file, bytes),
                Err(e) => self.say(format!("{file} was not saved: {e}")),
            }
        } else if p.frames > PATIENCE {
            let file = std::mem::take(&mut p.file);
            inner.pending = None;
            drop(inner);
            self.say(format!("{file} was not saved: no screenshot came from the window"));
        } else if p.shot.is_none() && p.posed > 1 {
            let slot = Slot::default();
            p.shot = Some(slot.clone());
            drop(inner);
            ctx.request_screenshot(move |image| {
                if let Ok(mut s) = slot.lock() {
                    *s = Some(image);
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use egui::{Color32, pos2};

    #[test]
    fn csv_quotes_what_must_be_quoted() {
        let mut t = Table::new(["run", "loss, nats"]);
        t.row(["a \"b\"".into(), 0.1.into()]);
        t.row(["c".into(), f64::NAN.into()]);
        assert_eq!(t.to_csv(), "run,\"loss, nats\"\n\"a \"\"b\"\"\",0.1\nc,\n");
    }

    #[test]
    fn a_crop_holds_the_pixels_of_its_rectangle() {
        let pixels = (0..12).map(|i| Color32::from_gray(i as u8)).collect();
        let image = ColorImage::new([4, 3], pixels);
        let part = crop(&image, Rect::from_min_max(pos2(0.5, 0.5), pos2(1.5, 9.0)), 2.0).expect("part");
        let gray: Vec<u8> = part.pixels.iter().map(|p| p.r()).collect();
        assert_eq!((part.size, gray), ([2, 2], vec![5, 6, 9, 10]));
        assert!(crop(&image, Rect::from_min_max(pos2(9.0, 0.0), pos2(12.0, 1.0)), 1.0).is_none());
    }

    #[test]
    fn png_reads_back() {
        let image = ColorImage::new([2, 1], vec![Color32::RED, Color32::from_rgb(1, 2, 3)]);
        let bytes = png(&image).expect("png");
        let mut r = png::Decoder::new(std::io::Cursor::new(bytes)).read_info().expect("head");
        let mut out = vec![0; r.output_buffer_size().expect("size")];
        r.next_frame(&mut out).expect("frame");
        assert_eq!(out, [255, 0, 0, 255, 1, 2, 3, 255]);
    }
}
