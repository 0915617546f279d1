//! Trainers, explorers and a synchronizer in one program, and over HTTP.

mod http;
mod https;
mod restart;
mod styles;
mod world;
