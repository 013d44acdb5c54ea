//! The dashboard: pictures of every view on recorded runs, run folders in every state, time of a frame, the
//! real program on a virtual screen.
//!
//! The pictures are drawn by a software Vulkan driver. `UPDATE_SNAPSHOTS=1 cargo test --release --features
//! dashboard --test dashboard` writes them anew; look at them before committing.

#[path = "dashboard/folders.rs"]
mod folders;
#[path = "dashboard/input.rs"]
mod input;
#[path = "dashboard/pictures.rs"]
mod pictures;
#[path = "dashboard/program.rs"]
mod program;
#[path = "dashboard/recorded.rs"]
mod recorded;
#[path = "dashboard/speed.rs"]
mod speed;
