//! What `script/bench profile` makes of samples: `script/lib/flame.py`, on samples of ours.

use std::fs;
use std::io::Write;
use std::process::{Command, Stdio};

const SAMPLES: &str = "
dray-fuse-0  8
\tffffffff81000003 tcp_sendmsg
\tffffffff81000002 __x64_sys_sendto
\tffffffff81000001 do_syscall_64
\t    55d6c98997f0 dray::send::h0123456789abcdef
\t    7f6d0cf3e5e3 start_thread

two words  9
\tffffffff81000005 do_preadv
\tffffffff81000004 x64_sys_call
\tffffffff81000001 do_syscall_64

two words  9
\t    55d6c9899111 <a & b>::c

swapper  0
\tffffffff81000009 idle
";

#[test]
fn samples_become_folded_stacks_a_graph_and_shares_of_the_time() {
    if Command::new("python3").arg("--version").output().is_err() {
        eprintln!("skipped: there is no python3");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (folded, svg) = (dir.path().join("folded"), dir.path().join("svg"));
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../script/lib/flame.py");
    let mut flame = Command::new("python3")
        .args([script, "--arm", "uring", "--load", "rand4k", "--us", "30"])
        .args(["--role", "client=7,8", "--role", "server=9", "--folded"])
        .arg(&folded)
        .arg("--svg")
        .arg(&svg)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    flame.stdin.take().unwrap().write_all(SAMPLES.as_bytes()).unwrap();
    let output = flame.wait_with_output().unwrap();
    assert!(output.status.success());
    let mut expected = vec![
        "client;start_thread;dray::send;do_syscall_64;__x64_sys_sendto;tcp_sendmsg 1",
        "server;<a & b>::c 1",
        "server;do_syscall_64;x64_sys_call;do_preadv 1",
    ];
    expected.sort_unstable();
    assert_eq!(fs::read_to_string(&folded).unwrap().lines().collect::<Vec<_>>(), expected);
    let svg = fs::read_to_string(&svg).unwrap();
    assert!(svg.contains("&lt;a &amp; b&gt;::c: 10.00 us, 33.3 %"), "{svg}");
    assert!(!svg.contains("idle"), "{svg}");
    let said = String::from_utf8(output.stdout).unwrap();
    for part in ["client.sendto", "server.preadv", "server.outside of the kernel"] {
        let metric = format!("\"metric\": \"rand4k.{part}\", \"value\": 10.0, \"unit\": \"us\"");
        assert!(said.contains(&metric), "{part}: {said}");
    }
}
