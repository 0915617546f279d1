//! What is on the wire, from outside: the bytes are what they were (`golden`), everything comes
//! back as it was sent, and what was damaged, cut or made up is refused without harm.

mod any;
mod frames;
mod golden;
mod handshake;
mod hostile;
mod messages;
mod models;
mod samples;
