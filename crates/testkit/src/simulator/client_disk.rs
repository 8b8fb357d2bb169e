//! The disk of a client's machine, in memory. It outlives processes. A loss of power takes of it what was not synced, or
//! a part of that.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_rpc::client::{LogDisk, LogFile, LogLock};
use dray_rt::random_u64;

/// What goes wrong with a disk.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DiskFaults {
    /// One in so many writes and syncs fails. None: no one does.
    pub(super) fails_one_in: Option<u64>,
    /// Syncs are answered, and bring nothing to media.
    pub(super) ignores_syncs: bool,
}

/// A disk.
#[derive(Clone)]
pub(super) struct SimulatedDisk {
    faults: DiskFaults,
    state: Arc<Mutex<DiskState>>,
}

/// As one process has it. When the process has died nothing can be done with it.
#[derive(Clone)]
struct DiskOfProcess {
    process: u64,
    disk: SimulatedDisk,
}

#[derive(Default)]
struct DiskState {
    /// The process that lives.
    process: u64,
    files: Vec<FileBytes>,
    names: Names,
    /// The names that are on media.
    synced_names: Names,
    locks: BTreeSet<PathBuf>,
}

/// Files by their paths, and directories.
#[derive(Clone, Default)]
struct Names {
    files: BTreeMap<PathBuf, usize>,
    dirs: BTreeSet<PathBuf>,
}

#[derive(Default)]
struct FileBytes {
    now: Vec<u8>,
    synced: Vec<u8>,
    /// A sync has failed: what was written before is never brought to media.
    is_spoiled: bool,
}

fn below(bound: u64) -> u64 {
    random_u64() % bound
}

fn not_found() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOENT)
}

impl SimulatedDisk {
    pub(super) fn new(faults: DiskFaults) -> SimulatedDisk {
        SimulatedDisk { faults, state: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, DiskState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The disk as the process has it that lives now.
    pub(super) fn of_process(&self) -> Arc<dyn LogDisk> {
        let process = self.lock().process;
        Arc::new(DiskOfProcess { process, disk: self.clone() })
    }

    /// The process dies: its locks are free.
    pub(super) fn end_process(&self) {
        let mut state = self.lock();
        state.process += 1;
        state.locks.clear();
    }

    /// The machine loses power.
    pub(super) fn lose_power(&self) {
        self.end_process();
        let state = &mut *self.lock();
        state.names = Names::after_power(&state.names, &state.synced_names);
        state.synced_names = state.names.clone();
        state.files.iter_mut().for_each(FileBytes::lose_power);
    }

    fn fails(&self) -> bool {
        self.faults.fails_one_in.is_some_and(|one_in| below(one_in) == 0)
    }
}

impl Names {
    /// What was made or removed and not synced is there, or it is not.
    fn after_power(now: &Names, synced: &Names) -> Names {
        let mut found = Names::default();
        for dir in now.dirs.union(&synced.dirs) {
            let is_certain = now.dirs.contains(dir) && synced.dirs.contains(dir);
            let has_parent = dir.parent().is_none_or(|above| {
                !now.dirs.contains(above) && !synced.dirs.contains(above)
                    || found.dirs.contains(above)
            });
            if has_parent && (is_certain || below(2) == 0) {
                found.dirs.insert(dir.clone());
            }
        }
        for (path, file) in now.files.iter().chain(&synced.files) {
            let is_certain = now.files.contains_key(path) && synced.files.contains_key(path);
            let has_dir = path.parent().is_some_and(|dir| found.dirs.contains(dir));
            let is_known = found.files.contains_key(path);
            if has_dir && !is_known && (is_certain || below(2) == 0) {
                found.files.insert(path.clone(), *file);
            }
        }
        found
    }
}

impl FileBytes {
    /// Of what was not synced, the first part is there, with zeros behind it, or nothing.
    fn lose_power(&mut self) {
        if self.now != self.synced && !self.is_spoiled {
            let (first, len_bytes) = (self.synced.len(), self.now.len());
            let more = len_bytes.saturating_sub(first) as u64;
            let there = first + below(more + 1) as usize;
            let mut found = match more {
                0 => self.synced.clone(),
                _ => [&self.synced[..], &self.now[first..there]].concat(),
            };
            if below(2) == 0 {
                found.resize(found.len().max(len_bytes), 0);
            }
            self.synced = found;
        }
        (self.now, self.is_spoiled) = (self.synced.clone(), false);
    }
}

impl std::fmt::Debug for DiskOfProcess {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "disk of process {}", self.process)
    }
}

impl DiskOfProcess {
    /// Errors: the process is dead.
    fn state(&self) -> io::Result<MutexGuard<'_, DiskState>> {
        let state = self.disk.lock();
        match state.process == self.process {
            true => Ok(state),
            false => Err(io::Error::other("the process is dead")),
        }
    }

    fn file(&self, path: &Path) -> io::Result<Arc<dyn LogFile>> {
        let file = *self.state()?.names.files.get(path).ok_or_else(not_found)?;
        Ok(Arc::new(FileOfProcess { disk: self.clone(), file }))
    }
}

impl LogDisk for DiskOfProcess {
    fn make_dir(&self, dir: &Path) -> io::Result<()> {
        let mut state = self.state()?;
        let all = dir.ancestors().map(Path::to_owned);
        state.names.dirs.extend(all.filter(|dir| dir.parent().is_some())); // the root is always there
        Ok(())
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<PathBuf>> {
        let state = self.state()?;
        if !state.names.dirs.contains(dir) {
            return Err(not_found());
        }
        let all = state.names.files.keys().chain(&state.names.dirs);
        let within = all.filter(|path| path.parent() == Some(dir));
        Ok(within.filter_map(|path| path.file_name().map(PathBuf::from)).collect())
    }

    fn read(&self, path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
        let state = self.state()?;
        let file = state.names.files.get(path).ok_or_else(not_found)?;
        let bytes = &state.files[*file].now;
        Ok(bytes[..bytes.len().min(max_bytes as usize)].to_vec())
    }

    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.state()?;
        state.files.push(FileBytes { now: bytes.to_vec(), ..FileBytes::default() });
        let file = state.files.len() - 1;
        state.names.files.insert(path.to_owned(), file);
        Ok(())
    }

    fn create(&self, path: &Path) -> io::Result<Arc<dyn LogFile>> {
        if self.state()?.names.files.contains_key(path) {
            return Err(io::Error::from_raw_os_error(libc::EEXIST));
        }
        self.write(path, &[])?;
        self.file(path)
    }

    fn open(&self, path: &Path) -> io::Result<Arc<dyn LogFile>> {
        self.file(path)
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.state()?.names.files.remove(path).map(drop).ok_or_else(not_found)
    }

    fn remove_dir(&self, dir: &Path) -> io::Result<()> {
        let mut state = self.state()?;
        if !state.names.dirs.contains(dir) {
            return Err(not_found());
        }
        state.names.files.retain(|path, _| !path.starts_with(dir));
        state.names.dirs.retain(|path| !path.starts_with(dir));
        Ok(())
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        let mut state = self.state()?;
        if self.disk.faults.ignores_syncs {
            return Ok(());
        }
        let DiskState { names, synced_names, .. } = &mut *state;
        let is_within = |path: &Path| path.parent() == Some(dir);
        synced_names.files.retain(|path, _| !is_within(path));
        let files = names.files.iter().filter(|(path, _)| is_within(path));
        synced_names.files.extend(files.map(|(path, file)| (path.clone(), *file)));
        synced_names.dirs.retain(|path| !is_within(path));
        let dirs = names.dirs.iter().filter(|path| is_within(path));
        synced_names.dirs.extend(dirs.cloned());
        Ok(())
    }

    fn lock(&self, dir: &Path) -> io::Result<Option<LogLock>> {
        let is_free = self.state()?.locks.insert(dir.to_owned());
        let held = || HeldLock { disk: self.clone(), dir: dir.to_owned() };
        Ok(is_free.then(|| Box::new(held()) as LogLock))
    }
}

struct HeldLock {
    disk: DiskOfProcess,
    dir: PathBuf,
}

impl Drop for HeldLock {
    fn drop(&mut self) {
        if let Ok(mut state) = self.disk.state() {
            state.locks.remove(&self.dir);
        }
    }
}

struct FileOfProcess {
    disk: DiskOfProcess,
    file: usize,
}

impl LogFile for FileOfProcess {
    fn write_at(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let fails = self.disk.disk.fails();
        let mut state = self.disk.state()?;
        let (file, at) = (&mut state.files[self.file].now, at as usize);
        let done = if fails { below(bytes.len() as u64 + 1) as usize } else { bytes.len() };
        file.resize(file.len().max(at + done), 0);
        file[at..at + done].copy_from_slice(&bytes[..done]);
        match fails {
            true => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
            false => Ok(()),
        }
    }

    fn sync_data(&self) -> io::Result<()> {
        let fails = self.disk.disk.fails();
        let mut state = self.disk.state()?;
        let file = &mut state.files[self.file];
        if fails {
            file.is_spoiled = true;
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        if !self.disk.disk.faults.ignores_syncs && !file.is_spoiled {
            file.synced = file.now.clone();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_rt::{DriverKind, Executor};

    /// What was synced is there, and of all else some is, in some of many losses of power.
    #[test]
    fn a_loss_of_power_takes_what_was_not_synced() {
        let mut executor = Executor::new(DriverKind::Simulated { seed: 1 }).unwrap();
        executor.block_on(async {
            let (dir, mut lens, mut made) =
                (Path::new("/logs/a"), BTreeSet::new(), BTreeSet::new());
            for _ in 0..100 {
                let disk = SimulatedDisk::new(DiskFaults::default());
                let process = disk.of_process();
                process.make_dir(dir).unwrap();
                let file = process.create(&dir.join("one")).unwrap();
                file.write_at(b"synced", 0).unwrap();
                file.sync_data().unwrap();
                for dir in dir.ancestors() {
                    process.sync_dir(dir).unwrap();
                }
                file.write_at(b"lost", 6).unwrap();
                process.create(&dir.join("other")).unwrap();
                disk.lose_power();
                assert!(process.list(dir).is_err() && file.write_at(b"late", 0).is_err());
                let process = disk.of_process();
                let bytes = process.read(&dir.join("one"), 100).unwrap();
                assert!(bytes.starts_with(b"synced"));
                lens.insert(bytes.len());
                made.insert(process.list(dir).unwrap().len());
            }
            assert_eq!((lens.len(), made.len()), (5, 2));
        });
    }
}
