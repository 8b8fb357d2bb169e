//! Locations of the control sockets and notes of a mount.
//!
//! A location depends on the mount point and on the environment of the mounting process. The supervisor has
//! both on its command line. So other processes find it, from any environment, wherever the mount has been
//! moved since.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use clap::Parser;

use crate::args::{Args, Command, MountSupervisorArgs};
use crate::mount::mount_table::{self, MountEntry};
use crate::paths;

/// One place where the processes of a mount may be found: what they listen at and their notes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlLocation {
    /// The run directory.
    pub dir: PathBuf,
    /// What they are called in it.
    pub name: String,
}

/// The supervisors of this machine, as far as they can be seen from here.
pub struct Supervisors(Vec<SupervisorProcess>);

struct SupervisorProcess {
    pid: u32,
    /// The user whose process it is.
    user: u32,
    /// When it was started, in ticks of the kernel.
    began: u64,
    connection: u32,
    /// None: it is of a version that does not say so.
    dir: Option<PathBuf>,
    at: PathBuf,
    /// The lists behind `-o`, as it was mounted with.
    options: Vec<String>,
}

impl Supervisors {
    /// The supervisors that there are now.
    pub fn look() -> Supervisors {
        let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
        Supervisors(processes.filter_map(|process| seen(&process.path())).collect())
    }

    /// Where the processes of `mount` may be found, the most likely place first.
    pub fn whereabouts_of(&self, mount: &MountEntry) -> Vec<ControlLocation> {
        let mut places = vec![mount.at.clone()];
        places.extend(mount_table::places_of(mount.connection).into_iter().map(|place| place.at));
        let usual = paths::run_dirs(mount.user);
        let reported = self.of(mount, &places).into_iter().flat_map(|seen| {
            let dirs = seen.dir.clone().map_or_else(|| usual.clone(), |dir| vec![dir]);
            dirs.into_iter().map(move |dir| (dir, seen.at.clone()))
        });
        // The mount's supervisor may be dead, or in another container.
        let guessed =
            places.iter().flat_map(|at| usual.iter().map(move |dir| (dir.clone(), at.clone())));
        let mut all: Vec<(PathBuf, PathBuf)> = Vec::new();
        for one in reported.chain(guessed) {
            if !all.contains(&one) {
                all.push(one);
            }
        }
        // A mount of a version that knew no numbers may be called as another mount was called once.
        let called = |connection: Option<u32>| {
            let name = move |(dir, at): &(PathBuf, PathBuf)| {
                let name = paths::mount_name(at, connection);
                ControlLocation { dir: dir.clone(), name }
            };
            all.iter().map(name)
        };
        called(Some(mount.connection)).chain(called(None)).collect()
    }

    /// The process that supervises `mount`; none if it is not to be seen from here.
    pub fn process_of(&self, mount: &MountEntry) -> Option<u32> {
        let places = [mount.at.clone()];
        self.of(mount, &places).into_iter().max_by_key(|seen| seen.began).map(|seen| seen.pid)
    }

    /// What `mount` was mounted with; none if its supervisor is not to be seen from here.
    pub fn options_of(&self, mount: &MountEntry) -> Option<Vec<String>> {
        let places = [mount.at.clone()];
        let newest = self.of(mount, &places).into_iter().max_by_key(|seen| seen.began);
        newest.map(|seen| seen.options.clone())
    }

    /// The supervisors that may be of `mount`, which is at `places`. The number of a connection
    /// alone does not tell. The kernel gives that of one that has ended to the next one, while the
    /// supervisor of the former may live on. So who says that it mounted at another place is asked
    /// only where nobody says that it mounted here. Then the mount was moved, and the supervisor
    /// that was started last has the number now.
    fn of(&self, mount: &MountEntry, places: &[PathBuf]) -> Vec<&SupervisorProcess> {
        // Whatever processes of other users say of this mount is not believed.
        let ours = |seen: &&SupervisorProcess| {
            seen.user == mount.user && seen.connection == mount.connection
        };
        let (here, elsewhere): (Vec<&SupervisorProcess>, Vec<&SupervisorProcess>) =
            self.0.iter().filter(ours).partition(|seen| places.contains(&seen.at));
        match here.is_empty() {
            true => elsewhere.into_iter().max_by_key(|seen| seen.began).into_iter().collect(),
            false => here,
        }
    }
}

/// What the process at `dir` of /proc says, if it is a supervisor.
fn seen(dir: &Path) -> Option<SupervisorProcess> {
    let pid = dir.file_name()?.to_str()?.parse().ok()?; // not all are processes
    let line = fs::read(dir.join("cmdline")).ok()?;
    let user = fs::metadata(dir).ok()?.uid();
    let args = parse(&line)?;
    let began = began(&fs::read(dir.join("stat")).ok()?)?;
    let (connection, at) = (args.connection, args.mount.mountpoint);
    let (dir, options) = (args.run_dir, args.mount.options);
    Some(SupervisorProcess { pid, user, began, connection, dir, at, options })
}

/// When a process was started, from its stat (proc(5), field 22). Its name in parentheses may hold
/// anything; field 3 is the first behind it.
fn began(stat: &[u8]) -> Option<u64> {
    let behind_name = stat.iter().rposition(|&byte| byte == b')')? + 1;
    let text = std::str::from_utf8(&stat[behind_name..]).ok()?;
    text.split_ascii_whitespace().nth(22 - 3)?.parse().ok()
}

/// The words of a supervisor, each ended by a zero.
fn parse(line: &[u8]) -> Option<MountSupervisorArgs> {
    let line = line.strip_suffix(b"\0").unwrap_or(line);
    let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
    if words.get(1) != Some(&&b"mount-supervisor"[..]) {
        return None;
    }
    let words = words.into_iter().map(|word| OsString::from_vec(word.to_vec()));
    match Args::try_parse_from(words).ok()?.command {
        Command::MountSupervisor(args) => Some(args),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_supervisor_is_known_by_its_words() {
        let words = "dray mount-supervisor --clones 2 dray://h/x /mnt/a -oro --connection 52 \
                     --program /usr/bin/dray --run-dir /run/there ";
        let args = parse(words.replace(' ', "\0").as_bytes()).unwrap();
        assert_eq!((args.connection, args.mount.mountpoint.to_str()), (52, Some("/mnt/a")));
        assert_eq!(args.run_dir, Some("/run/there".into()));
        let former = words.replace("--run-dir /run/there ", "").replace(' ', "\0");
        assert_eq!(parse(former.as_bytes()).unwrap().run_dir, None);
        for other in ["", "dray\0mount-daemon\0--clones\x002\0", "sh\0mount-supervisor\0"] {
            assert!(parse(other.as_bytes()).is_none(), "{other}");
        }
    }

    fn said(user: u32, at: &str) -> SupervisorProcess {
        let dir = Some(Path::new("/there").join(at.trim_start_matches('/')));
        SupervisorProcess {
            pid: 1,
            user,
            began: 0,
            connection: 1 << 30,
            dir,
            at: at.into(),
            options: Vec::new(),
        }
    }

    fn found(all: Vec<SupervisorProcess>) -> Vec<PathBuf> {
        let mount = MountEntry {
            at: "/m".into(),
            source: "s".into(),
            connection: 1 << 30,
            user: 7,
            checks: true,
        };
        let whereabouts = Supervisors(all).whereabouts_of(&mount).into_iter();
        let mut dirs: Vec<PathBuf> =
            whereabouts.map(|one| one.dir).filter(|dir| dir.starts_with("/there")).collect();
        dirs.dedup(); // one with the number, and one without
        dirs
    }

    /// What had been moved away from `/m` was taken for what was mounted there afterwards.
    #[test]
    fn who_is_called_by_the_number_is_found_before_who_is_not() {
        let mount = MountEntry {
            at: "/m".into(),
            source: "s".into(),
            connection: 1 << 30,
            user: 0,
            checks: true,
        };
        let names = Supervisors(Vec::new()).whereabouts_of(&mount).into_iter().map(|one| one.name);
        let expected = [Some(1 << 30), None].map(|number| paths::mount_name(&mount.at, number));
        assert_eq!(names.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn who_is_somebody_else_is_not_believed() {
        assert_eq!(found(vec![said(8, "/was"), said(7, "/was")]), [Path::new("/there/was")]);
        assert!(found(vec![said(8, "/m")]).is_empty());
    }

    /// The same of a mount that was moved away from where it was mounted.
    #[test]
    fn of_supervisors_that_say_the_same_number_the_last_one_has_it() {
        let begun = |began, at| SupervisorProcess { began, ..said(7, at) };
        let seen = vec![begun(5, "/before"), begun(9, "/now"), begun(7, "/between")];
        assert_eq!(found(seen), [Path::new("/there/now")]);
        assert!(began(&fs::read("/proc/self/stat").unwrap()).is_some_and(|ticks| ticks > 0));
        assert_eq!(began(b"7 (cut) short"), None);
    }

    /// `dray upgrade` sent its signal to the supervisor of a mount that had just ended, because the
    /// next one had got the number of its connection.
    #[test]
    fn whose_number_was_given_to_another_mount_is_not_taken_for_its_supervisor() {
        assert_eq!(found(vec![said(7, "/was"), said(7, "/m")]), [Path::new("/there/m")]);
    }
}
