//! The posix backend on real file systems. These tests need root, since serving users does.

mod data;
mod devices;
mod escape;
mod fenced;
mod learned;
mod names;
mod open;
mod outside;
mod removed;
mod rig;
mod rights;
mod shared;
mod stable;
mod twins;
mod waiting;
