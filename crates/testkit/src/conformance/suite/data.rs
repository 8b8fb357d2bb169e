//! Data of open files.

use std::time::Duration;

use dray_core::{
    Allocate, Buf, BufMut, Errno, LockOwner, OpenHow, RemoveKind, Seek, SetAttr, Write,
};

use super::place::{TestDirectory, close, errno, read, user, write};

fn range(flags: i32, at: u64, len_bytes: u64) -> Allocate {
    Allocate { flags, at, len_bytes }
}

// proves: P21
pub(super) async fn reads_are_short_only_at_the_end(place: &TestDirectory) {
    let (_, file) = place.file("file").await;
    let bytes: Vec<u8> = (0..200_000u32).map(|at| (at % 253) as u8).collect();
    write(&file, 0, &bytes).await;
    assert_eq!(read(&file, 0, bytes.len()).await, bytes);
    assert_eq!(read(&file, 199_990, 100).await, bytes[199_990..]);
    assert_eq!(read(&file, 200_000, 100).await, b"");
    assert_eq!(read(&file, u64::MAX >> 2, 100).await, b"");
    let mut into = BufMut::heap(10);
    into.put(b"head");
    let into = file.read(&user(0), 7, into).await.unwrap();
    assert_eq!(into.filled(), [b"head", &bytes[7..13]].concat(), "a read appends");
    write(&file, 300_000, b"behind a hole").await;
    assert!(read(&file, 200_000, 100_000).await.iter().all(|&byte| byte == 0));
    close(file).await;
}

// proves: P19
pub(super) async fn appends_of_two_open_files_do_not_mix(place: &TestDirectory) {
    let (entry, first) = place.file("log").await;
    let how = OpenHow::new(libc::O_WRONLY | libc::O_APPEND);
    let one = place.client(0).open(&user(0), entry.id, how).await.unwrap();
    let other = place.client(1).open(&user(0), entry.id, how).await.unwrap();
    let append = Write { append: true, ..Write::default() };
    for round in 0..20u8 {
        let file = if round % 2 == 0 { &one } else { &other };
        let count = file.write(&user(0), append, Buf::from(vec![round; 100])).await.unwrap();
        assert_eq!(count, 100);
    }
    let all = read(&first, 0, 5000).await;
    assert_eq!(all.len(), 2000);
    for (round, record) in all.chunks(100).enumerate() {
        assert!(record.iter().all(|&byte| usize::from(byte) == round), "record {round}");
    }
    for file in [first, one, other] {
        close(file).await;
    }
}

// proves: P27
pub(super) async fn a_deleted_file_lives_while_it_is_open(place: &TestDirectory) {
    let (entry, file) = place.file("doomed").await;
    write(&file, 0, b"before").await;
    let other = place.client(1).open(&user(0), entry.id, OpenHow::READ).await.unwrap();
    place.remove("doomed", RemoveKind::File).await.unwrap();
    assert_eq!(errno(place.lookup("doomed").await), Some(Errno::ENOENT));
    write(&file, 6, b" and after").await;
    assert_eq!(read(&other, 0, 100).await, b"before and after");
    let attr = file.getattr(&user(0)).await.unwrap();
    assert_eq!((attr.nlink, attr.size), (0, 16));
    close(file).await;
    assert_eq!(read(&other, 0, 6).await, b"before");
    close(other).await;
    // A close need not be waited for, and can be on its way again after a broken connection.
    let mut tries = 0;
    while errno(place.fs().getattr(&user(0), entry.id).await) != Some(Errno::ESTALE) {
        tries += 1;
        assert!(tries < 1000, "a deleted file outlives its last close");
        dray_rt::sleep(Duration::from_millis(10)).await;
    }
}

// proves: P50
pub(super) async fn rights_are_those_of_the_open(place: &TestDirectory) {
    let (entry, file) = place.file("file").await;
    close(file).await;
    let fs = place.fs();
    let reader = fs.open(&user(1), entry.id, OpenHow::READ).await.unwrap();
    let writer = fs.open(&user(1), entry.id, OpenHow::new(libc::O_WRONLY)).await.unwrap();
    let set = SetAttr { mode: Some(0), ..SetAttr::default() };
    place.client(1).setattr(&user(0), entry.id, set).await.unwrap();
    let count = writer.write(&user(1), Write::at(0), Buf::from(&b"still"[..])).await.unwrap();
    assert_eq!(count, 5);
    let got = reader.read(&user(1), 0, BufMut::heap(10)).await.unwrap();
    assert_eq!(got.filled(), b"still");
    assert_eq!(errno(fs.open(&user(1), entry.id, OpenHow::READ).await), Some(Errno::EACCES));
    let wrong = reader.write(&user(1), Write::at(0), Buf::from(&b"x"[..])).await;
    assert_eq!(errno(wrong), Some(Errno::EBADF));
    let wrong = writer.read(&user(1), 0, BufMut::heap(1)).await;
    assert_eq!(wrong.err().map(|(error, _)| error.errno()), Some(Errno::EBADF));
    let cut = SetAttr { size: Some(1), ..SetAttr::default() };
    assert_eq!(writer.setattr(&user(1), cut).await.unwrap().size, 1);
    assert_eq!(errno(reader.setattr(&user(1), cut).await), Some(Errno::EINVAL));
    close(reader).await;
    close(writer).await;
}

// proves: P23
pub(super) async fn holes_and_data_are_distinguished(place: &TestDirectory) {
    let (_, file) = place.file("sparse").await;
    write(&file, 1 << 20, &[1; 65_536]).await;
    let cx = user(0);
    let size = (1 << 20) + 65_536;
    let data = file.seek(&cx, 0, Seek::Data).await.unwrap();
    assert!(data <= 1 << 20, "data is found at {data}");
    assert_eq!(file.seek(&cx, 1 << 20, Seek::Data).await.unwrap(), 1 << 20);
    assert_eq!(file.seek(&cx, 1 << 20, Seek::Hole).await.unwrap(), size);
    assert_eq!(errno(file.seek(&cx, size, Seek::Data).await), Some(Errno::ENXIO));
    assert_eq!(errno(file.seek(&cx, size, Seek::Hole).await), Some(Errno::ENXIO));
    close(file).await;
}

// proves: P23
pub(super) async fn space_is_given_and_punched(place: &TestDirectory) {
    let (_, file) = place.file("file").await;
    let (cx, keep) = (user(0), libc::FALLOC_FL_KEEP_SIZE);
    let size = || async { file.getattr(&user(0)).await.unwrap().size };
    file.allocate(&cx, range(keep, 0, 10_000)).await.unwrap();
    assert_eq!(size().await, 0);
    file.allocate(&cx, range(0, 0, 10_000)).await.unwrap();
    assert_eq!(size().await, 10_000);
    write(&file, 0, &[9; 20_000]).await;
    file.allocate(&cx, range(keep | libc::FALLOC_FL_PUNCH_HOLE, 5000, 10_000)).await.unwrap();
    let mut want = vec![9; 20_000];
    want[5000..15_000].fill(0);
    assert_eq!(read(&file, 0, 30_000).await, want);
    assert_eq!(errno(file.allocate(&cx, range(0, 0, 0)).await), Some(Errno::EINVAL));
    close(file).await;
}

// proves: P23
pub(super) async fn zeroed_ranges_read_as_zeros(place: &TestDirectory) {
    let (_, file) = place.file("file").await;
    write(&file, 0, &[9; 20_000]).await;
    let flags = libc::FALLOC_FL_ZERO_RANGE;
    file.allocate(&user(0), range(flags, 100, 10_000)).await.unwrap();
    let mut want = vec![9; 20_000];
    want[100..10_100].fill(0);
    assert_eq!(read(&file, 0, 30_000).await, want);
    file.allocate(&user(0), range(flags, 19_000, 2000)).await.unwrap();
    want.resize(21_000, 0);
    want[19_000..].fill(0);
    assert_eq!(read(&file, 0, 30_000).await, want);
    close(file).await;
}

// proves: P23
pub(super) async fn ranges_are_cut_out_and_put_in(place: &TestDirectory) {
    let (_, file) = place.file("file").await;
    let block = u64::from(file.getattr(&user(0)).await.unwrap().block_bytes).max(4096);
    let part = |fill: u8| vec![fill; block as usize];
    write(&file, 0, &[part(1), part(2), part(3)].concat()).await;
    let all = 8 * block as usize;
    let cut = range(libc::FALLOC_FL_COLLAPSE_RANGE, block, block);
    file.allocate(&user(0), cut).await.unwrap();
    assert_eq!(read(&file, 0, all).await, [part(1), part(3)].concat());
    let put = range(libc::FALLOC_FL_INSERT_RANGE, block, block);
    file.allocate(&user(0), put).await.unwrap();
    assert_eq!(read(&file, 0, all).await, [part(1), part(0), part(3)].concat());
    let odd = range(libc::FALLOC_FL_COLLAPSE_RANGE, 1, block);
    assert_eq!(errno(file.allocate(&user(0), odd).await), Some(Errno::EINVAL));
    close(file).await;
}

// proves: P24
pub(super) async fn ranges_are_copied(place: &TestDirectory) {
    let (_, from) = place.file("from").await;
    let (_, to) = place.file("to").await;
    let cx = user(0);
    write(&from, 0, b"0123456789").await;
    assert_eq!(from.copy_range(&cx, 2, &*to, 3, 4).await.unwrap(), 4);
    assert_eq!(read(&to, 0, 100).await, b"\0\0\x002345");
    assert_eq!(from.copy_range(&cx, 8, &*to, 0, 100).await.unwrap(), 2);
    assert_eq!(from.copy_range(&cx, 10, &*to, 0, 100).await.unwrap(), 0);
    assert_eq!(errno(from.copy_range(&cx, 0, &*from, 1, 5).await), Some(Errno::EINVAL));
    // Ranges that share one byte, and such as touch.
    for (at, to_at) in [(0, 4), (4, 0)] {
        let shares = from.copy_range(&cx, at, &*from, to_at, 5).await;
        assert_eq!(errno(shares), Some(Errno::EINVAL), "{at} to {to_at}");
    }
    assert_eq!(from.copy_range(&cx, 0, &*from, 5, 5).await.unwrap(), 5);
    assert_eq!(read(&from, 0, 100).await, b"0123401234");
    assert_eq!(from.copy_range(&cx, 7, &*from, 4, 3).await.unwrap(), 3);
    assert_eq!(read(&from, 0, 100).await, b"0123234234");
    close(from).await;
    close(to).await;
}

pub(super) async fn sync_and_flush_succeed(place: &TestDirectory) {
    let (_, file) = place.file("file").await;
    write(&file, 0, b"data").await;
    file.sync(&user(0), true).await.unwrap();
    file.sync(&user(0), false).await.unwrap();
    file.flush(&user(0), LockOwner::own(1)).await.unwrap();
    close(file).await;
    let dir = place.fs().open(&user(0), place.dir, OpenHow::DIRECTORY).await.unwrap();
    dir.sync(&user(0), false).await.unwrap();
    close(dir).await;
}
