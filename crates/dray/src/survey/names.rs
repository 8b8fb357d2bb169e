//! Loads on names: threads create files, look at their attributes and unlink them. All work in one directory,
//! or each in its own. In one directory they wait for each other as far as the file system below has them.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use dray_client::Client;
use dray_core::{Context, CreateHow, Errno, FileId, FileSystem, Make, Name, OpenHow, RemoveKind};

use super::cpu;
use super::load::{
    Gates, LoadError, LoadResult, LoadTarget, Tally, block_on, file_names, own_context,
    reportable_error,
};

/// Files of each thread.
const FILES_MAX: usize = 50_000;

/// What is done, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameWork {
    Create,
    Stat,
    Unlink,
}

impl NameWork {
    pub const ALL: [NameWork; 3] = [NameWork::Create, NameWork::Stat, NameWork::Unlink];

    pub fn name(self) -> &'static str {
        match self {
            NameWork::Create => "create",
            NameWork::Stat => "stat",
            NameWork::Unlink => "unlink",
        }
    }
}

/// Where the threads work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Directories {
    /// All in one.
    One,
    /// Each in its own.
    Own,
}

impl Directories {
    pub fn name(self) -> &'static str {
        match self {
            Directories::One => "one",
            Directories::Own => "own",
        }
    }
}

/// One measurement of each kind of work.
pub struct NameLoad {
    pub threads: usize,
    pub directories: Directories,
    pub duration: Duration,
}

impl NameLoad {
    /// Runs it. Errors: one of a thread.
    pub fn run(&self, place: &LoadTarget) -> Result<[LoadResult; 3], LoadError> {
        let others: &[u32] = match place {
            LoadTarget::Path(_, others) | LoadTarget::Remote(_, _, others) => others,
            LoadTarget::Local(_) => &[],
        };
        let mut gates = Gates::of_phases(self.threads + 1, NameWork::ALL.len());
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..self.threads)
                .map(|index| {
                    let gates = gates.clone();
                    scope.spawn(move || self.run_thread(place, index, gates))
                })
                .collect();
            let mut results = NameWork::ALL.map(|_| LoadResult::default());
            for (phase, result) in results.iter_mut().enumerate() {
                gates.pass(Gates::before(phase));
                let (begin, cpu_before) = (Instant::now(), cpu::used(others));
                gates.pass(Gates::end(phase));
                result.elapsed = begin.elapsed();
                result.cpu = cpu::used(others).saturating_sub(cpu_before);
            }
            let mut failed = Vec::new();
            for thread in threads {
                match thread.join().map_err(|_| "a thread of the load died")? {
                    Ok(tallies) => {
                        results.iter_mut().zip(tallies).for_each(|(all, one)| all.add(one));
                    }
                    Err(error) => failed.push(error),
                }
            }
            if let Some(error) = reportable_error(failed) {
                return Err(error);
            }
            results.iter_mut().for_each(LoadResult::settle);
            Ok(results)
        })
    }

    fn run_thread(
        &self,
        place: &LoadTarget,
        index: usize,
        gates: Gates,
    ) -> Result<[Tally; 3], LoadError> {
        let dir = match self.directories {
            Directories::One => format!("{}names", file_names()),
            Directories::Own => format!("{}names-{index}", file_names()),
        };
        block_on(async {
            match place {
                LoadTarget::Path(at, _) => {
                    self.run_in(&PathNames(at.join(dir)), index, gates).await
                }
                LoadTarget::Local(fs) => {
                    let names = FsNames::new(&**fs, own_context(), dir);
                    self.run_in(&names, index, gates).await
                }
                LoadTarget::Remote(target, options, _) => {
                    let client = Client::connect(target, options).await?;
                    let names = FsNames::new(client.fs(), client.context(), dir);
                    let result = self.run_in(&names, index, gates).await;
                    client.goodbye();
                    result
                }
            }
        })
    }

    async fn run_in(
        &self,
        names: &impl NameCalls,
        index: usize,
        mut gates: Gates,
    ) -> Result<[Tally; 3], LoadError> {
        let dir = names.make_dir().await?;
        let mut made = 0;
        let result = self.phases(names, dir, (index, &mut made), &mut gates).await;
        gates.pass(usize::MAX);
        // What is left after a failure, or an interruption.
        for number in 0..made {
            let _ = names.unlink(dir, &file_name(index, number)).await; // the directory tells
        }
        // The last thread finds a shared directory empty.
        let removed = names.remove_dir().await;
        match (result, removed) {
            (Ok(tallies), Ok(())) => Ok(tallies),
            (Ok(_), Err(error)) | (Err(error), _) => Err(error),
        }
    }

    /// `made`: how many files there are. They have the numbers below.
    async fn phases(
        &self,
        names: &impl NameCalls,
        dir: FileId,
        (index, made): (usize, &mut usize),
        gates: &mut Gates,
    ) -> Result<[Tally; 3], LoadError> {
        let mut creates = Tally::begin(gates, Gates::begin(0), self.duration);
        while creates.goes_on() && *made < FILES_MAX {
            names.create(dir, &file_name(index, *made)).await?;
            *made += 1;
            creates.did_one();
        }
        gates.pass(Gates::end(0));
        if *made == 0 {
            return Err("no file was created in time".into());
        }
        let mut stats = Tally::begin(gates, Gates::begin(1), self.duration);
        for number in (0..*made).cycle() {
            if !stats.goes_on() {
                break;
            }
            names.stat(dir, &file_name(index, number)).await?;
            stats.did_one();
        }
        gates.pass(Gates::end(1));
        let mut unlinks = Tally::begin(gates, Gates::begin(2), self.duration);
        while unlinks.goes_on() && *made > 0 {
            names.unlink(dir, &file_name(index, *made - 1)).await?;
            *made -= 1;
            unlinks.did_one();
        }
        gates.pass(Gates::end(2));
        Ok([creates, stats, unlinks])
    }
}

fn file_name(index: usize, number: usize) -> String {
    format!("{index}-{number}")
}

/// The calls of a load, by system calls or through the library.
trait NameCalls {
    /// Makes the directory, unless another thread has made it.
    async fn make_dir(&self) -> Result<FileId, LoadError>;
    /// Removes the directory, unless files of other threads are left there, or it is gone.
    async fn remove_dir(&self) -> Result<(), LoadError>;
    async fn create(&self, dir: FileId, name: &str) -> Result<(), LoadError>;
    async fn stat(&self, dir: FileId, name: &str) -> Result<(), LoadError>;
    async fn unlink(&self, dir: FileId, name: &str) -> Result<(), LoadError>;
}

/// By system calls, in this directory.
struct PathNames(PathBuf);

fn unless(done: std::io::Result<()>, expected: &[std::io::ErrorKind]) -> Result<(), LoadError> {
    match done {
        Err(error) if !expected.contains(&error.kind()) => Err(error.into()),
        Ok(()) | Err(_) => Ok(()),
    }
}

impl NameCalls for PathNames {
    async fn make_dir(&self) -> Result<FileId, LoadError> {
        unless(std::fs::create_dir(&self.0), &[std::io::ErrorKind::AlreadyExists])?;
        Ok(FileId { ino: 0, generation: 0 }) // paths need none
    }

    async fn remove_dir(&self) -> Result<(), LoadError> {
        let others = [std::io::ErrorKind::DirectoryNotEmpty, std::io::ErrorKind::NotFound];
        unless(std::fs::remove_dir(&self.0), &others)
    }

    async fn create(&self, _: FileId, name: &str) -> Result<(), LoadError> {
        Ok(std::fs::File::create_new(self.0.join(name)).map(drop)?)
    }

    async fn stat(&self, _: FileId, name: &str) -> Result<(), LoadError> {
        Ok(std::fs::symlink_metadata(self.0.join(name)).map(drop)?)
    }

    async fn unlink(&self, _: FileId, name: &str) -> Result<(), LoadError> {
        Ok(std::fs::remove_file(self.0.join(name))?)
    }
}

/// Through a file system of this process, in the directory of this name at its top.
struct FsNames<'a> {
    fs: &'a dyn FileSystem,
    cx: Context,
    dir: String,
}

impl<'a> FsNames<'a> {
    fn new(fs: &'a dyn FileSystem, cx: Context, dir: String) -> FsNames<'a> {
        FsNames { fs, cx, dir }
    }
}

fn as_name(name: &str) -> Result<&Name, LoadError> {
    Ok(Name::new(name.as_bytes())?)
}

impl NameCalls for FsNames<'_> {
    async fn make_dir(&self) -> Result<FileId, LoadError> {
        let (root, name) = (self.fs.info().root, as_name(&self.dir)?);
        match self.fs.make(&self.cx, root, name, Make::Directory { mode: 0o700 }).await {
            Ok(entry) => Ok(entry.id),
            Err(error) if error.errno() == Errno::EEXIST => {
                Ok(self.fs.lookup(&self.cx, root, name).await?.id)
            }
            Err(error) => Err(error.into()),
        }
    }

    async fn remove_dir(&self) -> Result<(), LoadError> {
        let (root, name) = (self.fs.info().root, as_name(&self.dir)?);
        match self.fs.remove(&self.cx, root, name, RemoveKind::Directory).await {
            Err(error) if !matches!(error.errno(), Errno::ENOTEMPTY | Errno::ENOENT) => {
                Err(error.into())
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    async fn create(&self, dir: FileId, name: &str) -> Result<(), LoadError> {
        let how = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: true };
        let (_, file) = self.fs.create(&self.cx, dir, as_name(name)?, how).await?;
        Ok(file.close(&self.cx).await?)
    }

    async fn stat(&self, dir: FileId, name: &str) -> Result<(), LoadError> {
        self.fs.lookup(&self.cx, dir, as_name(name)?).await?;
        Ok(())
    }

    async fn unlink(&self, dir: FileId, name: &str) -> Result<(), LoadError> {
        Ok(self.fs.remove(&self.cx, dir, as_name(name)?, RemoveKind::File).await?)
    }
}

#[cfg(test)]
mod tests {
    use dray_backends::memory::{MemoryFs, MemoryOptions};

    use super::*;

    fn load(threads: usize, directories: Directories) -> NameLoad {
        NameLoad { threads, directories, duration: Duration::from_millis(20) }
    }

    #[test]
    fn all_that_is_created_is_looked_at_and_unlinked() {
        let dir = tempfile::tempdir().unwrap();
        let place = LoadTarget::Path(dir.path().to_owned(), Vec::new());
        for directories in [Directories::One, Directories::Own] {
            for threads in [1, 3] {
                let [creates, stats, unlinks] = load(threads, directories).run(&place).unwrap();
                assert!(creates.count > 0 && stats.count > 0 && unlinks.count <= creates.count);
                assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
            }
        }
        let fs = std::sync::Arc::new(MemoryFs::new(MemoryOptions::default()));
        let place = LoadTarget::Local(fs);
        assert!(load(1, Directories::One).run(&place).unwrap()[0].count > 0);
    }

    #[test]
    fn a_load_that_cannot_begin_fails_and_does_not_hang() {
        let place = LoadTarget::Path("/nowhere/at/all".into(), Vec::new());
        assert!(load(3, Directories::Own).run(&place).is_err());
    }
}
