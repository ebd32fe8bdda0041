use termwise_train::data::*;
#[test]
fn zz() {
    let shared = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data");
    let cfg = DataConfig { sources: vec![format!("{shared}/sotu.txt")], tokenizer: format!("{shared}/llama2-tokenizer/tokenizer.json"), documents: Documents::Line, ..Default::default() };
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        for _ in 0..2 {
            let start = std::time::Instant::now();
            let s = pool.install(|| TextSource::prepare(&cfg, "/tmp/t1scratch/cache".as_ref(), &Prepare { rebuild: true, ..Prepare::default() }).unwrap());
            println!("{threads} threads: {:?}, {} tokens {} held docs", start.elapsed(), s.tokens().len(), s.held_out_documents());
        }
    }
    let start = std::time::Instant::now();
    TextSource::prepare(&cfg, "/tmp/t1scratch/cache".as_ref(), &Prepare::default()).unwrap();
    println!("reuse {:?}", start.elapsed());
    let bytes = DataConfig { tokenizer: "bytes".into(), ..cfg };
    let start = std::time::Instant::now();
    TextSource::prepare(&bytes, "/tmp/t1scratch/cache-b".as_ref(), &Prepare { rebuild: true, ..Prepare::default() }).unwrap();
    println!("bytes {:?}", start.elapsed());
}
