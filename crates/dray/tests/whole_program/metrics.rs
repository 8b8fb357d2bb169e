//! What servers and mounts tell their monitoring.

use std::fs;

use crate::common;
use crate::common::daemons::{daemon, signal};
use crate::common::exposition::{get, metrics, value};
use crate::common::ports::free_port;
use crate::common::{Rig, is_mounted, wait_for};

#[test]
fn a_server_s_metrics_have_the_format_and_count() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    let address = format!("127.0.0.1:{}", free_port());
    rig.serve(&["--metrics", &address]);
    let at = rig.mount("mount", "");
    fs::write(at.join("file"), vec![1; 5000]).unwrap();
    let text = metrics(&address);
    assert_eq!(value(&text, "dray_bytes_total{export=\"data\",op=\"write\"}"), 5000.0);
    assert_eq!(value(&text, "dray_latency_seconds_count{export=\"data\",op=\"create\"}"), 1.0);
    assert_eq!(value(&text, "dray_clients "), 1.0);
    assert!(get(&address, "/healthz").ends_with("ok\n"));
    rig.umount(&at);
}

#[test]
fn a_mount_s_metrics_have_the_format_and_outlive_its_daemon() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let address = format!("127.0.0.1:{}", free_port());
    // A name that must be escaped in a label.
    let at = rig.mount("mo\"unt", &format!("transport=classic,metrics={address}"));
    fs::write(at.join("file"), vec![1; 5000]).unwrap();
    let text = metrics(&address);
    assert!(text.contains("/mo\\\"unt\",target=\"dray+unix://"), "{text}");
    let of = |text: &str, name: &str, op: &str| {
        let labels = text.lines().find_map(|line| line.strip_prefix("dray_mount_connected{"));
        let labels = labels.unwrap().split_once('}').unwrap().0;
        match op {
            "" => value(text, &format!("{name}{{{labels}}}")),
            op => value(text, &format!("{name}{{{labels},op=\"{op}\"}}")),
        }
    };
    assert_eq!(of(&text, "dray_mount_connected", ""), 1.0);
    assert_eq!(of(&text, "dray_mount_bytes_total", "write"), 5000.0);
    assert_eq!(of(&text, "dray_mount_latency_seconds_count", "create"), 1.0);
    assert_eq!(of(&text, "dray_mount_requests_total", "create"), 1.0);
    assert_eq!(of(&text, "dray_mount_losses_total", ""), 0.0);
    assert!(of(&text, "dray_mount_calls_total", "") >= 3.0);
    // The next daemon serves them at the same place, and counts files opened before it, too.
    let mut kept = fs::File::create(at.join("kept")).unwrap();
    let dead = daemon(&at).unwrap();
    signal(dead, libc::SIGKILL);
    wait_for("the next daemon", || daemon(&at).is_some_and(|next| next != dead));
    std::io::Write::write_all(&mut kept, &[1; 700]).unwrap();
    wait_for("its metrics", || std::net::TcpStream::connect(&address).is_ok());
    assert_eq!(of(&metrics(&address), "dray_mount_bytes_total", "write"), 700.0);
    drop(kept);
    rig.umount(&at);
    wait_for("the end of its metrics", || std::net::TcpStream::connect(&address).is_err());
}

#[test]
fn a_port_in_use_is_reported_before_anything_is_mounted() {
    if common::skipped() {
        return;
    }
    let mut rig = Rig::new();
    rig.serve(&[]);
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap().to_string();
    let at = rig.path("said");
    let options = format!("metrics={address}");
    let output = rig.run(&["mount", &rig.target(), at.to_str().unwrap(), "-o", &options]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&address) && said.contains("another program"), "{said}");
    assert!(!is_mounted(&at));
    let export = format!("a={}", rig.path("export").display());
    let listen = format!("unix://{}", rig.path("second").display());
    let state = rig.path("second-state");
    let args = ["serve", "--export", &export, "--listen", &listen, "--metrics", &address];
    let output = rig.run(&[&args[..], &["--state", state.to_str().unwrap()]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains(&address) && said.contains("another program"), "{said}");
}
