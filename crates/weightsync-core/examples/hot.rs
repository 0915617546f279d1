use weightsync_core::{Dtype, delta::*};
use std::time::Instant;
fn main(){
 let d:f64=std::env::args().nth(1).unwrap().parse().unwrap();
 let which=std::env::args().nth(2).unwrap();
 let n=128usize<<20;
 let mut s=1u64;
 let mut rnd=||{s^=s<<13;s^=s>>7;s^=s<<17;s};
 let mut old=vec![0u8;n]; for c in old.chunks_exact_mut(8){c.copy_from_slice(&rnd().to_le_bytes())}
 let mut new=old.clone();
 let t=(d/100.0*4294967296.0) as u64; let mut ch=0;
 for c in new.chunks_exact_mut(2){ let r=rnd(); if (r>>32)<t {ch+=1; let w=u16::from_le_bytes([c[0],c[1]]); let m=if r&7==0 {2+(r>>8&3) as u16}else{1}; let w=if r&16==0{w.wrapping_add(m)}else{w.wrapping_sub(m)}; c.copy_from_slice(&w.to_le_bytes());}}
 let p=Pattern::of(Dtype::BF16); let mut sc=Scratch::new();
 let mut out=vec![Vec::new();n>>22];
 let mut img=old.clone();
 for r in 0..20 {
  let i=Instant::now(); img.copy_from_slice(&old); let m=i.elapsed().as_secs_f64();
  let i=Instant::now();
  if r==0||which=="enc" { for (k,(o,w)) in old.chunks(1<<22).zip(new.chunks(1<<22)).enumerate(){ out[k].clear(); encode(p,Codec::Fast,o,w,&mut out[k],&mut sc).unwrap();} }
  let e=i.elapsed().as_secs_f64();
  let i=Instant::now();
  if which=="app" { for (k,o) in img.chunks_mut(1<<22).enumerate(){ apply(p,&out[k],o,None,&mut sc).unwrap();} }
  let a=i.elapsed().as_secs_f64();
  if r%6==5 {println!("enc {:.2} ns/ch r {:.2}; app {:.2} ns/ch r {:.2}", e*1e9/ch as f64, e/m, a*1e9/ch as f64,a/m);}
 }
}
