//! Limits on the memory of a mount's processes: the real command, real mounts, a memory control group.
//! Needs root.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common;
use crate::common::{Rig, processes, wait_for};
use serde_json::Value;

const LIMIT_BYTES: u64 = 64 << 20;

/// A memory control group with a limit; in the end the processes in it are moved out.
struct Group {
    dir: PathBuf,
    parent: PathBuf,
}

impl Group {
    /// None, which is said, where no such group is to be had.
    fn new() -> Option<Group> {
        static NUMBER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let name = format!("dray-memory-{}-{number}", std::process::id());
        for (parent, limit) in
            [("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")]
        {
            let parent = PathBuf::from(parent);
            let dir = parent.join(&name);
            if fs::create_dir(&dir).is_err() {
                continue;
            }
            let group = Group { dir, parent };
            if fs::write(group.dir.join(limit), LIMIT_BYTES.to_string()).is_ok() {
                return Some(group);
            }
        }
        eprintln!("left out: no control group for memory is to be had");
        None
    }

    fn is_of_version_1(&self) -> bool {
        self.parent.ends_with("memory")
    }

    /// Words before a command that run it in this group.
    fn within(&self) -> [String; 4] {
        let script = format!("echo $$ >{} && exec \"$@\"", self.dir.join("cgroup.procs").display());
        ["sh".into(), "-c".into(), script, "sh".into()]
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        for pid in fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default().lines() {
            let _ = fs::write(self.parent.join("cgroup.procs"), pid); // it may have ended
        }
        let _ = fs::remove_dir(&self.dir);
    }
}

/// Whether root may do what CAP_SYS_RESOURCE is for; many containers' may not.
fn may_flush() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap() & 1 << 24 != 0
}

/// Mounts with the processes of the mount in this group.
fn mount_within(rig: &mut Rig, group: &Group, name: &str) -> PathBuf {
    let at = rig.moved_to(name);
    fs::create_dir(&at).unwrap();
    let target = rig.target();
    let words = group.within();
    let mut words: Vec<&str> = words.iter().map(String::as_str).collect();
    words.extend([env!("CARGO_BIN_EXE_dray"), "mount", &target, at.to_str().unwrap()]);
    let mounted = rig.run_as(0, &[], words[0], &words[1..]);
    assert!(mounted.status.success(), "{}", String::from_utf8_lossy(&mounted.stderr));
    at
}

fn processes_of(at: &Path) -> Vec<i32> {
    ["mount-supervisor", "mount-daemon"].iter().flat_map(|kind| processes(kind, at)).collect()
}

/// The kernel's number of the mount.
fn connection(at: &Path) -> u32 {
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let ours = |line: &&str| line.split(' ').nth(4) == at.to_str();
    let device = table.lines().find(ours).and_then(|line| line.split(' ').nth(2)).unwrap();
    device.rsplit(':').next().unwrap().parse().unwrap()
}

/// Stores into each page of a large shared mapping, in this group. Ended after four minutes, and the mount
/// with it: two that wait for each other can be ended in no other way.
fn store_within(rig: &mut Rig, group: &Group, at: &Path) {
    let script = "import mmap,os,sys\n\
                  fd=os.open(sys.argv[1],os.O_RDWR|os.O_CREAT)\n\
                  os.ftruncate(fd,160<<20)\n\
                  m=mmap.mmap(fd,160<<20)\n\
                  for i in range(0,160<<20,4096): m[i]=1\n\
                  m.flush()\n";
    let (program, file) = (rig.path("store.py"), at.join("file"));
    fs::write(&program, script).unwrap();
    let [sh, c, enter, name] = group.within();
    let line =
        format!("exec {sh} {c} '{enter}' {name} python3 {} {}", program.display(), file.display());
    let connection = connection(at);
    let storing = rig.start(&line, at);
    let begin = std::time::Instant::now();
    while !storing.is_over() && begin.elapsed().as_secs() < 240 {
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    let over = storing.is_over();
    if !over {
        let abort = format!("/sys/fs/fuse/connections/{connection}/abort");
        fs::write(abort, "1").unwrap();
    }
    let status = rig.end_of(storing);
    assert!(over, "the program and the daemon wait for each other");
    assert!(status.success(), "{status}");
}

/// The daemon needed memory, waited for pages of the program to be written, and was who would have
/// written them. Both were stuck until somebody aborted the connection.
// proves: D4
#[test]
fn a_program_that_stores_into_a_mapping_does_not_wait_for_its_daemon_for_ever() {
    if common::skipped() {
        return;
    }
    let Some(group) = Group::new() else { return };
    let mut rig = Rig::new();
    rig.serve(&[]);
    let at = mount_within(&mut rig, &group, "mount");
    let status = rig.demand(&["status", at.to_str().unwrap(), "--json", "--interval", "0"]);
    let status: Value = serde_json::from_str(status.lines().next().unwrap()).unwrap();
    assert_eq!(status["flusher"], may_flush());
    // In groups of version 2 none waits for pages that are being written.
    let limit = group.is_of_version_1().then_some(LIMIT_BYTES);
    assert_eq!(status["memory_limit_bytes"], Value::from(limit));
    let said = rig.demand(&["status", at.to_str().unwrap(), "--interval", "0"]);
    let may_hang = !may_flush() && group.is_of_version_1();
    assert_eq!(said.contains("MAY HANG"), may_hang, "{said}");
    if !may_hang {
        store_within(&mut rig, &group, &at);
    } else {
        eprintln!("left out: a flusher, which this machine's root may not make");
        // What docs/OPERATIONS.md has for that.
        for pid in processes_of(&at) {
            fs::write(group.parent.join("cgroup.procs"), pid.to_string()).unwrap();
        }
        let said = rig.demand(&["status", at.to_str().unwrap(), "--interval", "0"]);
        assert!(!said.contains("MAY HANG"), "{said}");
        store_within(&mut rig, &group, &at);
    }
    rig.umount(&at);
    wait_for("its processes", || processes_of(&at).is_empty());
}

/// All threads of both are flushers, and so is who follows a daemon.
#[test]
fn every_thread_of_a_mount_is_a_flusher_where_it_may_be() {
    /// PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE (include/linux/sched.h).
    const FLAGS: u64 = 0x0008_0000 | 0x0010_0000;
    if common::skipped() {
        return;
    }
    if !may_flush() {
        eprintln!("left out: a flusher, which this machine's root may not make");
        return;
    }
    let (mut rig, at) = Rig::mounted("");
    let check = || {
        for pid in processes_of(&at) {
            for thread in fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten() {
                let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
                let Some((name, rest)) = stat.rsplit_once(") ") else { continue }; // it has ended
                let flags: u64 = rest.split(' ').nth(6).unwrap().parse().unwrap();
                assert_eq!(flags & FLAGS, FLAGS, "{name}");
            }
        }
    };
    check();
    let before = processes("mount-daemon", &at);
    // SAFETY: no memory is passed; the process is the mount's.
    unsafe { libc::kill(before[0], libc::SIGKILL) };
    wait_for("the next daemon", || {
        let now = processes("mount-daemon", &at);
        !now.is_empty() && now != before && fs::metadata(&at).is_ok()
    });
    check();
    rig.umount(&at);
}
