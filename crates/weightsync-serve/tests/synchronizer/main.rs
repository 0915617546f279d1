//! Trainers, explorers and a synchronizer in one program, and over HTTP.

mod hostile;
mod http;
mod https;
mod restart;
mod styles;
mod world;
