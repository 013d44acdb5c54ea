//! The few functions of libnccl that are used, found when they are asked for: nothing of NVIDIA's is needed to build.
//!
//! `cudarc` has them too, but looks for `libnccl.so` only, which NVIDIA's run-time packages and wheels do not have
//! (`libnccl.so.2` is what they have), and panics where it is missing.

use super::super::error::{CollectiveError, Result};
use libloading::Library;
use std::error::Error;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;

/// Where the library is, if not where the system looks: a file.
pub const PATH: &str = "BIRKHOFF_NCCL";

/// `ncclFloat32`, `ncclSum` of nccl.h.
const FLOAT32: c_int = 7;
const SUM: c_int = 0;

/// `ncclUniqueId`: what the ranks of a group know one another by.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclComm_t`.
type Comm = *mut c_void;

/// The library's functions; a result of 0 is success.
pub struct Api {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    comm_init_rank: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int,
    comm_get_async_error: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    comm_abort: unsafe extern "C" fn(Comm) -> c_int,
    comm_destroy: unsafe extern "C" fn(Comm) -> c_int,
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    all_reduce:
        unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, *mut c_void) -> c_int,
    /// Keeps the functions there.
    _library: Library,
}

fn unavailable(why: String) -> CollectiveError {
    CollectiveError::Unavailable {
        transport: "nccl",
        why,
        instead: format!(
            "install NCCL 2 (NVIDIA's package libnccl2, or `pip install nvidia-nccl-cu12` and {PATH}=.../nvidia/nccl/lib/libnccl.so.2), \
             or use --collective tcp"
        ),
    }
}

impl Api {
    /// The library at [`PATH`], else the system's; loaded once.
    ///
    /// # Errors
    /// If it is not there, or is another one.
    pub fn get() -> Result<&'static Api> {
        static API: OnceLock<std::result::Result<Api, String>> = OnceLock::new();
        let api = API.get_or_init(|| match std::env::var(PATH) {
            Ok(path) if !path.is_empty() => {
                Self::load(&path).map_err(|e| format!("{PATH}={path} cannot be loaded ({e})"))
            }
            _ => Self::load("libnccl.so.2")
                .or_else(|e| Self::load("libnccl.so").map_err(|_| e))
                .map_err(|e| format!("its library cannot be loaded ({e})")),
        });
        api.as_ref().map_err(|why| unavailable(why.clone()))
    }

    /// From a file.
    ///
    /// # Errors
    /// The loader's words.
    pub fn load(name: &str) -> std::result::Result<Api, String> {
        // what is wrong is in the source
        Self::open(name).map_err(|e| match e.source() {
            Some(why) => why.to_string(),
            None => e.to_string(),
        })
    }

    fn open(name: &str) -> std::result::Result<Api, libloading::Error> {
        // SAFETY: the signatures are those of nccl.h, the same since NCCL 2.4. Loading runs the library's own initialisers,
        // which is what whoever names it asks for.
        unsafe {
            let library = Library::new(name)?;
            Ok(Api {
                get_version: *library.get(b"ncclGetVersion\0")?,
                get_unique_id: *library.get(b"ncclGetUniqueId\0")?,
                comm_init_rank: *library.get(b"ncclCommInitRank\0")?,
                comm_get_async_error: *library.get(b"ncclCommGetAsyncError\0")?,
                comm_abort: *library.get(b"ncclCommAbort\0")?,
                comm_destroy: *library.get(b"ncclCommDestroy\0")?,
                get_error_string: *library.get(b"ncclGetErrorString\0")?,
                all_reduce: *library.get(b"ncclAllReduce\0")?,
                _library: library,
            })
        }
    }

    pub(super) fn checked(&self, code: c_int) -> std::result::Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: returns a constant text for every number.
        let text = unsafe {
            let text = (self.get_error_string)(code);
            if text.is_null() { "an unknown error".into() } else { CStr::from_ptr(text).to_string_lossy() }
        };
        Err(format!("NCCL reports: {text} (NCCL_DEBUG=WARN tells more)"))
    }

    /// Major, minor and patch.
    ///
    /// # Errors
    /// The library's.
    pub fn version(&self) -> std::result::Result<(i32, i32, i32), String> {
        let mut v = 0;
        // SAFETY: writes one int.
        self.checked(unsafe { (self.get_version)(&mut v) })?;
        // since 2.9 the major number has a digit more
        Ok(match v {
            ..10_000 => (v / 1000, v / 100 % 10, v % 100),
            _ => (v / 10_000, v / 100 % 100, v % 100),
        })
    }

    /// A new group's.
    ///
    /// # Errors
    /// The library's.
    pub fn unique_id(&self) -> std::result::Result<UniqueId, String> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: writes one id.
        self.checked(unsafe { (self.get_unique_id)(&mut id) })?;
        Ok(id)
    }
}

/// This rank's end of a group.
pub struct Group {
    api: &'static Api,
    comm: Comm,
    /// Not to be waited for any more.
    broken: bool,
}

// SAFETY: a communicator may be used by any thread, one at a time, which `&mut self` takes care of.
unsafe impl Send for Group {}

impl Group {
    /// Joins; waits for all others. The device is that of the CUDA context of this thread.
    ///
    /// # Errors
    /// The library's.
    pub fn join(
        api: &'static Api,
        id: UniqueId,
        rank: usize,
        world: usize,
    ) -> std::result::Result<Group, String> {
        let mut comm: Comm = std::ptr::null_mut();
        // SAFETY: writes one communicator.
        api.checked(unsafe { (api.comm_init_rank)(&mut comm, world as c_int, id, rank as c_int) })?;
        Ok(Group { api, comm, broken: false })
    }

    /// Puts a sum in place over all ranks into a stream.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// `at` is the address of `n` f32 on the group's device, `stream` one of its streams; both stay until the sum is done.
    pub unsafe fn sum(&mut self, at: u64, n: usize, stream: *mut c_void) -> std::result::Result<(), String> {
        let at = at as *mut c_void;
        // SAFETY: the caller's.
        self.api.checked(unsafe { (self.api.all_reduce)(at, at, n, FLOAT32, SUM, self.comm, stream) })
    }

    /// What went wrong in the background.
    ///
    /// # Errors
    /// That.
    pub fn trouble(&mut self) -> std::result::Result<(), String> {
        let mut code = 0;
        // SAFETY: writes one int.
        self.api.checked(unsafe { (self.api.comm_get_async_error)(self.comm, &mut code) })?;
        self.api.checked(code)
    }

    /// Ends what is in progress, so that nobody waits for it.
    pub fn abort(&mut self) {
        if !std::mem::replace(&mut self.broken, true) {
            // SAFETY: once; the communicator is not used afterwards, as the transport is not after an error.
            unsafe { (self.api.comm_abort)(self.comm) };
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !self.broken {
            // SAFETY: nothing is in progress, and nobody has it any more.
            unsafe { (self.api.comm_destroy)(self.comm) };
        }
    }
}
