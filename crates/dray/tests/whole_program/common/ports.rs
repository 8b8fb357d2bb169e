//! Ports for servers that cannot say which one the kernel gave them.

use std::net::{Ipv6Addr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

/// Below those that the kernel gives to a process that asks for any
/// (`net.ipv4.ip_local_port_range`, from 32768 on). No connection and no other server of a test
/// takes one of these between our look and its use.
const FIRST: u16 = 20_000;
const COUNT: u16 = 12_000;

/// A port of all addresses that nobody listens on, and that no other test of this process is given.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    // Where several test programs run at once, each begins elsewhere.
    let begin = std::process::id().wrapping_mul(97);
    let ports = (0..COUNT).map(|_| {
        let number = begin.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed).into());
        FIRST + (number % u32::from(COUNT)) as u16
    });
    let is_free = |port: &u16| {
        let anywhere = TcpListener::bind((Ipv6Addr::UNSPECIFIED, *port)).is_ok();
        anywhere && TcpListener::bind(("0.0.0.0", *port)).is_ok()
    };
    ports.into_iter().find(is_free).expect("a free port")
}
