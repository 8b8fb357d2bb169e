//! The FUSE front end on the real kernel. Most of these tests need root.

mod adoption;
mod common;
mod decode;
mod handles;
mod kept_listings;
mod labels;
mod leased_pages;
mod leases;
mod listing;
mod locks;
mod mapping;
mod mount;
mod passthrough;
mod removed;
mod spares;
mod validity;
mod workers;
