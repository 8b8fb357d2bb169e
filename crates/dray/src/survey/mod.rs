//! `dray survey`: where the time goes. Four cuts through the same path, each longer than the one
//! before. They are the transport alone, the transport with a backend that does nothing, the
//! backend alone, everything.

mod cpu;
mod load;
mod names;
mod rig;
mod table;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dray_backends::posix::{PosixFs, PosixOptions, Squash};
use dray_client::{Client, Target};
use dray_core::{FileSystem, FsUuid};
use dray_rt::{DriverKind, Executor};
use serde_json::{Value, json};

use self::load::{CleanupError, LoadResult, LoadTarget, SurveyLoad};
use self::names::{Directories, NameLoad, NameWork};
use self::rig::{Loopback, Scratch};
use crate::args::SurveyArgs;
use crate::error::{ErrorContext, Failure};
use crate::sandbox::Sandbox;
use crate::{interrupt, key, mount::mount_table, output, paths, status};

/// Most threads of a load.
const THREADS_MAX: usize = 64;
/// Longest time of one measurement, seconds.
const SECONDS_MAX: f64 = 600.0;

/// Of fewer calls chance says more than the cut does: a shorter path can look slower than a longer one.
const CALLS_MIN: u64 = 100;
const FEW: &str = "some measurements are of fewer than 100 calls, which chance may have spoiled: \
                   more time (--seconds) makes them comparable";

const NEEDS_ROOT: &str = "a server and a mount of its own take root: survey it as root, or survey \
                          a directory in a mount that you may write to";

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadKind {
    /// The smallest call there is.
    Ping,
    /// Reads of a block.
    Read,
    /// Writes of a block.
    Write,
}

impl LoadKind {
    fn name(self) -> &'static str {
        match self {
            LoadKind::Ping => "ping",
            LoadKind::Read => "read",
            LoadKind::Write => "write",
        }
    }
}

/// What is to be surveyed.
enum Subject {
    /// An export of some server.
    Remote(Target),
    /// A directory of this machine.
    Dir(PathBuf),
    /// A mount of dray, or a directory in it.
    Mount { at: PathBuf, dir: PathBuf },
}

/// Measures and shows.
pub fn run(args: &SurveyArgs) -> Result<(), Failure> {
    check(args)?;
    interrupt::watch()?;
    let subject = subject(&args.target)?;
    let auth = args.auth.clone().unwrap_or_else(key::default_auth);
    let key = crate::serve::parse_auth(&auth)?;
    let timeout = Some(Duration::from_secs(30));
    let options = dray_client::ConnectOptions {
        key,
        timeout,
        replay_bytes: 0,
        caches: false,
        counts_on_one_user: false,
        leases: dray_client::LeaseWish::No,
        definition: 0,
        group: None,
        lease_share: None,
        aside: None,
        write_back: None,
    };
    let mut survey = Survey::new(args);
    let nothing = Loopback::start()?;
    let loopback = nothing.place();
    let outcome = match &subject {
        Subject::Remote(target) => survey.target(target, options, &loopback),
        Subject::Dir(dir) => survey.dir(dir, &loopback),
        Subject::Mount { at, dir } => survey.mount(at, dir, &loopback),
    };
    // What was measured is shown also where the rest could not be.
    survey.finish().and(outcome).and_then(|()| survey.missing())
}

fn check(args: &SurveyArgs) -> Result<(), Failure> {
    if !(0.01..=SECONDS_MAX).contains(&args.seconds) {
        return Err(Failure::usage("--seconds is a number from 0.01 to 600"));
    }
    if threads(args).iter().any(|threads| !(1..=THREADS_MAX).contains(threads)) {
        return Err(Failure::usage("--threads are numbers from 1 to 64"));
    }
    Ok(())
}

/// The numbers of threads to measure with.
fn threads(args: &SurveyArgs) -> Vec<usize> {
    match (&args.threads[..], args.metadata) {
        ([], false) => vec![1, 4],
        ([], true) => vec![1, 4, 16, 64],
        (given, _) => given.to_vec(),
    }
}

fn subject(target: &Path) -> Result<Subject, Failure> {
    if let Some(text) = target.to_str().filter(|text| text.contains("://")) {
        return text.parse().map(Subject::Remote).map_err(Failure::usage);
    }
    let shown = target.display();
    let followed = mount_table::follow(target);
    let followed = followed.doing(|| format!("cannot survey {shown}"))?;
    let dir = followed.path;
    let meta = std::fs::metadata(&dir).map_err(|error| {
        Failure::new(format!(
            "cannot survey {shown}: {error}; name a directory, or a target such as dray://HOST/NAME"
        ))
    })?;
    if !meta.is_dir() {
        let what = "it is not a directory; name the directory that it is in";
        return Err(Failure::new(format!("cannot survey {shown}: {what}")));
    }
    Ok(match followed.mount {
        Some(mount) => Subject::Mount { at: mount.at, dir },
        None => Subject::Dir(dir),
    })
}

/// Checks that there is a server, and that it lets us in: what is wrong shows in the exit code.
fn reach(target: &Target, options: &dray_client::ConnectOptions) -> Result<(), Failure> {
    let mut executor =
        Executor::new(DriverKind::Epoll).doing(|| "cannot start the executor".into())?;
    let client = executor.block_on(Client::connect(target, options))?;
    client.goodbye();
    Ok(())
}

fn open_backend(dir: &Path) -> Result<Arc<dyn FileSystem>, Failure> {
    let options = PosixOptions { squash: Squash::None, ..PosixOptions::default() };
    let fs = PosixFs::open(dir, FsUuid(1), options)
        .doing(|| format!("cannot use {} as an export would (needs root)", dir.display()))?;
    Ok(fs)
}

/// The measurements so far.
struct Survey<'a> {
    args: &'a SurveyArgs,
    rows: Vec<Value>,
    notes: Vec<&'static str>,
    /// Why cuts could not be made.
    missing: Vec<String>,
    done: usize,
    /// Some of the measurements are of too few calls.
    few: bool,
}

impl<'a> Survey<'a> {
    fn new(args: &'a SurveyArgs) -> Survey<'a> {
        let (rows, notes, missing) = (Vec::new(), Vec::new(), Vec::new());
        Survey { args, rows, notes, missing, done: 0, few: false }
    }

    fn target(
        &mut self,
        target: &Target,
        options: dray_client::ConnectOptions,
        loopback: &LoadTarget,
    ) -> Result<(), Failure> {
        reach(target, &options)?;
        let server = status::served_here(target);
        let processes = server.iter().map(|(pid, _)| *pid).collect();
        let full = LoadTarget::Remote(target.clone(), options, processes);
        self.pings("transport", &full)?;
        self.nothing(loopback)?;
        self.backend(server.as_ref().map(|(_, dir)| &**dir))?;
        self.note("full: without FUSE");
        if server.is_none() {
            self.note("transport, full: CPU without the server's, which this command cannot see");
        }
        self.work("full", &full)
    }

    fn dir(&mut self, dir: &Path, loopback: &LoadTarget) -> Result<(), Failure> {
        self.pings("transport", loopback)?;
        self.nothing(loopback)?;
        self.backend(Some(dir))?;
        if !paths::is_root() {
            self.miss("full", NEEDS_ROOT);
            return Ok(());
        }
        let scratch = Scratch::new(dir);
        let Some(scratch) = self.able("full", scratch)? else { return Ok(()) };
        let sandbox = Sandbox::serve("survey", scratch.path());
        let Some(mut sandbox) = self.able("full", sandbox)? else { return Ok(()) };
        let mounted = sandbox.mount("mount", "");
        let Some(at) = self.able("full", mounted)? else { return Ok(()) };
        let place = LoadTarget::Path(at, sandbox.processes());
        self.work("full", &place)
    }

    fn mount(&mut self, at: &Path, dir: &Path, loopback: &LoadTarget) -> Result<(), Failure> {
        let mount = rig::mount_process(at);
        let server = mount.as_ref().and_then(|(_, target)| status::served_here(target));
        let pids = [mount.map(|(pid, _)| pid), server.as_ref().map(|(pid, _)| *pid)];
        self.pings("transport", loopback)?;
        self.nothing(loopback)?;
        self.backend(server.as_ref().map(|(_, dir)| &**dir))?;
        if server.is_none() {
            self.note("full: CPU without the server's, which this command cannot see");
        }
        let scratch = Scratch::new(dir);
        let Some(scratch) = self.able("full", scratch)? else { return Ok(()) };
        let place =
            LoadTarget::Path(scratch.path().to_owned(), pids.into_iter().flatten().collect());
        self.work("full", &place)
    }

    /// The backend alone, if the directory that is served can be got at.
    fn backend(&mut self, dir: Option<&Path>) -> Result<(), Failure> {
        let Some(dir) = dir else {
            self.note("backend: not reachable from here; run `dray survey DIR` at the server");
            return Ok(());
        };
        let scratch = Scratch::new(dir);
        let Some(scratch) = self.able("backend", scratch)? else { return Ok(()) };
        let opened = open_backend(scratch.path());
        let Some(fs) = self.able("backend", opened)? else { return Ok(()) };
        self.work("backend", &LoadTarget::Local(fs))
    }

    /// What a cut needs. None: it cannot be had, which is noted, and the other cuts are made all the
    /// same.
    fn able<T>(&mut self, cut: &str, needed: Result<T, Failure>) -> Result<Option<T>, Failure> {
        interrupt::check()?; // before a failure that it has caused is reported
        let needed = needed.map_err(|failure| self.miss(cut, &failure.message));
        Ok(needed.ok())
    }

    /// A cut cannot be made, or not all of it.
    fn miss(&mut self, cut: &str, why: &str) {
        let begun = self.rows.iter().any(|row| row["cut"] == cut);
        let state = if begun { "incomplete" } else { "missing" };
        self.missing.push(format!("the cut `{cut}` is {state}: {why}"));
    }

    /// A failure if cuts could not be made, behind what was measured.
    fn missing(&mut self) -> Result<(), Failure> {
        let Some(last) = self.missing.pop() else { return Ok(()) };
        self.missing.iter().for_each(output::complain);
        Err(Failure::new(last))
    }

    fn note(&mut self, text: &'static str) {
        self.notes.push(text);
    }

    fn pings(&mut self, cut: &str, place: &LoadTarget) -> Result<(), Failure> {
        for threads in threads(self.args) {
            if !self.measure(cut, place, LoadKind::Ping, threads, 0)? {
                break;
            }
        }
        Ok(())
    }

    /// The cut through a server that does nothing. It has no names.
    fn nothing(&mut self, loopback: &LoadTarget) -> Result<(), Failure> {
        if self.args.metadata { Ok(()) } else { self.blocks("null", loopback) }
    }

    fn work(&mut self, cut: &str, place: &LoadTarget) -> Result<(), Failure> {
        if self.args.metadata { self.names(cut, place) } else { self.blocks(cut, place) }
    }

    fn names(&mut self, cut: &str, place: &LoadTarget) -> Result<(), Failure> {
        for directories in [Directories::One, Directories::Own] {
            for threads in threads(self.args) {
                if !self.measure_names(cut, place, threads, directories)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// Whether it could be measured, and the cut goes on.
    fn measure_names(
        &mut self,
        cut: &str,
        place: &LoadTarget,
        threads: usize,
        directories: Directories,
    ) -> Result<bool, Failure> {
        interrupt::check()?;
        self.done += 1;
        let (number, dirs) = (self.done, directories.name());
        progress(&format!("{number:3}  {cut}: names, {threads} threads, {dirs} directory"));
        let duration = Duration::from_secs_f64(self.args.seconds);
        let load = NameLoad { threads, directories, duration };
        let outcome = load.run(place).map_err(|error| {
            let advice = advice(errno_of(&error));
            Failure::new(format!("names: {error}{advice}"))
        });
        let Some(outcomes) = self.able(cut, outcome)? else { return Ok(false) };
        for (work, outcome) in NameWork::ALL.into_iter().zip(outcomes) {
            let mut row = row(cut, work.name(), (threads, 0), &outcome);
            row["directories"] = dirs.into();
            self.keep(row, &outcome)?;
        }
        Ok(true)
    }

    fn keep(&mut self, row: Value, outcome: &LoadResult) -> Result<(), Failure> {
        self.few |= outcome.count < CALLS_MIN;
        if self.args.json {
            output::print_json(&row)?;
        }
        self.rows.push(row);
        Ok(())
    }

    fn blocks(&mut self, cut: &str, place: &LoadTarget) -> Result<(), Failure> {
        for work in [LoadKind::Read, LoadKind::Write] {
            for block in &self.args.block {
                for threads in threads(self.args) {
                    if !self.measure(cut, place, work, threads, block.0)? {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether it could be measured, and the cut goes on.
    fn measure(
        &mut self,
        cut: &str,
        place: &LoadTarget,
        work: LoadKind,
        threads: usize,
        block_bytes: usize,
    ) -> Result<bool, Failure> {
        interrupt::check()?;
        self.done += 1;
        let name = work.name();
        progress(&format!("{:3}  {cut}: {name} {block_bytes} bytes, {threads} threads", self.done));
        let duration = Duration::from_secs_f64(self.args.seconds);
        let load = SurveyLoad { work, threads, block_bytes, duration };
        let outcome = load.run(place).map_err(|error| {
            let advice = advice(errno_of(&error));
            Failure::new(format!("{name}: {error}{advice}"))
        });
        let Some(outcome) = self.able(cut, outcome)? else { return Ok(false) };
        self.keep(row(cut, name, (threads, block_bytes), &outcome), &outcome)?;
        Ok(true)
    }

    fn finish(&mut self) -> Result<(), Failure> {
        progress("");
        if self.rows.is_empty() {
            return Ok(());
        }
        if self.few {
            self.note(FEW);
        }
        if self.args.json {
            self.notes.iter().for_each(|note| log::warn!("{note}"));
            return Ok(());
        }
        output::print(table::render(&self.rows))?;
        self.notes.iter().try_for_each(output::print_line)
    }
}

fn errno_of(error: &load::LoadError) -> Option<i32> {
    let error = error.downcast_ref::<CleanupError>().map_or(error, |left| &left.why);
    let ours = error.downcast_ref::<dray_core::Error>().map(|error| error.errno().raw());
    ours.or_else(|| error.downcast_ref::<std::io::Error>()?.raw_os_error())
}

/// What to do about an error, if there is anything.
fn advice(errno: Option<i32>) -> &'static str {
    match errno {
        Some(libc::ENOSPC | libc::EDQUOT) => {
            "; 32 MiB are needed for each thread: make room, or take fewer --threads"
        }
        Some(libc::EROFS) => {
            "; files are written and read: survey what can be written to, as the directory at the \
             server"
        }
        Some(libc::EACCES | libc::EPERM) => {
            "; you may not write there (of an export root may not, either, unless it says \
             squash=none): survey a directory where you may, or the directory at the server"
        }
        Some(libc::EHOSTDOWN) => "; the server went away meanwhile",
        _ => "",
    }
}

fn row(cut: &str, op: &str, (threads, block_bytes): (usize, usize), outcome: &LoadResult) -> Value {
    let round = |number: f64| (number * 100.0).round() / 100.0;
    let per_s = outcome.count as f64 / outcome.elapsed.as_secs_f64().max(1e-9);
    let cpu_us = outcome.cpu.as_secs_f64() * 1e6 / outcome.count.max(1) as f64;
    json!({
        "cut": cut,
        "op": op,
        "threads": threads,
        "block_bytes": block_bytes,
        "per_s": round(per_s),
        "mib_per_s": round(per_s * block_bytes as f64 / f64::from(1 << 20)),
        "p50_us": round(outcome.quantile_us(0.5)),
        "p99_us": round(outcome.quantile_us(0.99)),
        "cpu_us_per_op": round(cpu_us),
    })
}

/// One line on stderr that is overwritten by the next, on a terminal.
fn progress(text: &str) {
    use std::io::{IsTerminal, Write};
    let mut stderr = std::io::stderr();
    if stderr.is_terminal() {
        let _ = write!(stderr, "\r\x1b[K{text}"); // it is for show
        let _ = stderr.flush();
    }
}
