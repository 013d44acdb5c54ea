//! The dashboard: pictures of every view on a recorded run, run folders in every state, the real program.
