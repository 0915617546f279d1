//! The wire formats, from outside: the bytes stay the same (`golden`), every message decodes as it
//! was sent, and damaged, cut or made-up bytes are refused without harm.

mod any;
mod frames;
mod golden;
mod handshake;
mod hostile;
mod messages;
mod models;
mod samples;
